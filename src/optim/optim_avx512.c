/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for AVX-512 (F, BW, DQ, VL). */
#define MSC__TABLE msc__optim_avx512
#define MSC__DOUBLES 8u
#include "optim/optim_template.h"
