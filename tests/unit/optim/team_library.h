/* SPDX-License-Identifier: Apache-2.0 */
/** @file team_library.h  A library with the name of PyTorch's, and a runtime of OpenMP that counts what it is asked for. */
#ifndef MSC_TEST_TEAM_LIBRARY_H
#define MSC_TEST_TEAM_LIBRARY_H

#define TEAM_SEEN __attribute__((visibility("default")))

/** Calls of `GOMP_parallel` up to now. */
TEAM_SEEN unsigned team_calls(void);

/** From now on a call gets at most so many threads. */
TEAM_SEEN void team_limit(unsigned threads);

#endif /* MSC_TEST_TEAM_LIBRARY_H */
