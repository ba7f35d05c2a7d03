/* SPDX-License-Identifier: Apache-2.0 */
/** @file driver.h  Driver functions that the runtime hands out by name. */
#ifndef STANDIN_DRIVER_H
#define STANDIN_DRIVER_H

/** The function of that name; one that returns success for what is not modelled. */
void *driver_function(const char *name);

#endif
