/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The optimizer's kernels for NVIDIA's cards, compiled by NVRTC when they are first used (the text of this file and of what
 * it includes is in the library), and by nvcc in a test.
 */
#include "device/cuda/card_macros.h"
/* after it */
#include "optim/cuda/card_template.h"
