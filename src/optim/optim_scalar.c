/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for what the compiler's target has by itself. */
#define MSC__TABLE msc__optim_scalar
#define MSC__DOUBLES 4u
#include "optim/optim_template.h"
