/* SPDX-License-Identifier: Apache-2.0 */
/** @file fingerprint_kernels.h  What is compiled for each instruction set: the sum of whole blocks. */
#ifndef MSC_FINGERPRINT_KERNELS_H
#define MSC_FINGERPRINT_KERNELS_H

#include <stdint.h>

/**
 * Sum of the lanes of `count` blocks that lie behind each other, at any address.
 *
 * @param first number of the first one.
 * @param ahead where as many bytes lie that are read next, and are fetched meanwhile; NULL: nowhere.
 */
typedef uint64_t (*msc__fp_kernel)(const unsigned char *at, uint64_t first, uint64_t count,
                                   const unsigned char *ahead);

uint64_t msc__fp_scalar(const unsigned char *at, uint64_t first, uint64_t count, const unsigned char *ahead);

/** x86 has the wider ones, whichever the processor at hand is (src/fingerprint/meson.build). */
#if defined(__x86_64__)
#define MSC__FP_X86
uint64_t msc__fp_avx2(const unsigned char *at, uint64_t first, uint64_t count, const unsigned char *ahead);
uint64_t msc__fp_avx512(const unsigned char *at, uint64_t first, uint64_t count, const unsigned char *ahead);
#endif

/** Instruction sets, narrowest first. */
typedef enum msc__fp_isa { MSC__FP_SCALAR, MSC__FP_AVX2, MSC__FP_AVX512, MSC__FP_ISAS } msc__fp_isa;

/** NULL: not on this machine. */
msc__fp_kernel msc__fp_kernel_of(msc__fp_isa isa);

/** The widest that runs here. */
msc__fp_kernel msc__fp_kernel_here(void);

#endif /* MSC_FINGERPRINT_KERNELS_H */
