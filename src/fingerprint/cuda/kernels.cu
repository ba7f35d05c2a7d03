/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of fingerprints for NVIDIA's cards; as src/optim/cuda/kernels.cu. */
#include "device/cuda/card_macros.h"
/* after it */
#include "fingerprint/cuda/card_template.h"
