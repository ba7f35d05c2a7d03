/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for AVX2. */
#define MSC__TABLE msc__optim_avx2
#define MSC__DOUBLES 4u
#include "optim/optim_template.h"
