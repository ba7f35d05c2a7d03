/* SPDX-License-Identifier: Apache-2.0 */
/** @file card_group.h  How many threads of a card work together: in a group, and in step. The same for every kernel. */
#ifndef MSC_DEVICE_CARD_GROUP_H
#define MSC_DEVICE_CARD_GROUP_H

#define MSC__CARD_THREADS 128u
#define MSC__CARD_WARP 32u

#endif /* MSC_DEVICE_CARD_GROUP_H */
