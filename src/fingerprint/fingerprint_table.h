/* SPDX-License-Identifier: Apache-2.0 */
/** @file fingerprint_table.h  The kernel's text, made by tools/embed_text.py from cuda/kernels.cu. */
#ifndef MSC_FINGERPRINT_TABLE_H
#define MSC_FINGERPRINT_TABLE_H

extern const char msc__fingerprint_cuda_text[];

#endif /* MSC_FINGERPRINT_TABLE_H */
