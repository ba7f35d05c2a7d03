/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file invariant.h
 * What must hold here, whatever a caller does: stated in the code, and checked in every build but a release.
 *
 * A release (NDEBUG, which meson sets for buildtype=release) evaluates nothing and has no code for it. All other builds
 * end the process with file, line and expression: tests, fuzzers and sanitizers run so. What a caller of the public
 * functions may get wrong is not for here: it is answered with a status.
 */
#ifndef MSC_BASE_INVARIANT_H
#define MSC_BASE_INVARIANT_H

#ifdef NDEBUG
#define MSC__ASSERT(condition) ((void)sizeof((condition) ? 1 : 0))
#else
#include <assert.h>
#define MSC__ASSERT(condition) assert(condition)
#endif

#endif /* MSC_BASE_INVARIANT_H */
