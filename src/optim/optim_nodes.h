/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_nodes.h
 * Memory nodes of the machine: which one a core belongs to, and on which one memory lies.
 *
 * A core reaches memory of its own node at up to twice the rate of another node's, and an optimizer's step does
 * little else than reach memory. On a machine with one node, or where the system does not tell, there is one, and nothing
 * is ever asked.
 */
#ifndef MSC_OPTIM_NODES_H
#define MSC_OPTIM_NODES_H

#include <stdint.h>

/** Nodes that are distinguished. A machine with more has its work divided as if it had one. */
#define MSC__NODES_MOST 16u

/** Cores that are known; others count as the first node's. */
#define MSC__CORES_MOST 1024u

/** Addresses of one question. */
#define MSC__PLACES_MOST 256u

typedef struct msc__nodes {
    uint32_t count;                   /**< nodes with cores: 1 … MSC__NODES_MOST */
    uint8_t of_core[MSC__CORES_MOST]; /**< index of a core's node, in [0, count) */
    int number[MSC__NODES_MOST];      /**< the system's number of a node */
    /** The core that this thread runs on, or -1. */
    int (*core)(void);
    /** The system's number of the node of each address; negative: no page is there yet, or it is not known. 0: told. */
    long (*places)(unsigned long count, void *const *addresses, int *numbers);
} msc__nodes;

/**
 * Reads them.
 *
 * @param folder where the system describes its nodes: /sys/devices/system/node. There are `nodeN/cpulist` in it.
 */
void msc__nodes_read(msc__nodes *nodes, const char *folder);

/** Index of the node that this thread runs on. It may run elsewhere a moment later. */
uint32_t msc__nodes_here(const msc__nodes *nodes);

/**
 * `out[i]` = index of the node where `addresses[i]` lies; `count`, at most MSC__PLACES_MOST. What has no page yet, and what is
 * not known, lies on node i × nodes / count: the thread that touches it first brings its page there, and all are used alike.
 */
void msc__nodes_of(const msc__nodes *nodes, void *const *addresses, uint32_t count, uint8_t *out);

#endif /* MSC_OPTIM_NODES_H */
