/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `GOMP_parallel` is what GCC's compilers call for a parallel region (libgomp's ABI, which LLVM's and Intel's runtimes have
 * too). It is taken from the library that PyTorch's kernels are in: a process may have a second runtime, and its
 * threads would only get in the way of the first. If a program has another one in front (LD_PRELOAD), PyTorch's calls
 * go there, and so do these.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT */

#include "base/team.h"

#include <dlfcn.h>
#include <string.h>

#include "base/thread.h"

#define LIBRARY "libtorch_cpu.so"
#define SYMBOL "GOMP_parallel"

msc__team msc__team_find(void)
{
    msc__team team = {NULL, NULL};
    void *found;

    if (msc__fork_count() != 0)
        return team;
    team.library = dlopen(LIBRARY, RTLD_NOW | RTLD_NOLOAD); /* only if it is there */
    if (team.library == NULL)
        return team;
    found = dlsym(RTLD_DEFAULT, SYMBOL);
    if (found == NULL)
        found = dlsym(team.library, SYMBOL);
    if (found == NULL)
        msc__team_leave(&team);
    else
        memcpy(&team.run, &found, sizeof found);
    return team;
}

void msc__team_leave(msc__team *team)
{
    if (team->library != NULL)
        (void)dlclose(team->library);
    *team = (msc__team){NULL, NULL};
}
