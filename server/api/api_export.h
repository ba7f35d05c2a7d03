/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file api_export.h A run as one file: what its forms share. Of `api` alone.
 *
 * A form writes into the source's buffer, a part at a time: the start, each event, pieces of each series, the
 * end. Nothing is kept in memory but the part.
 */
#ifndef MSC_SERVER_API_EXPORT_H
#define MSC_SERVER_API_EXPORT_H

#include "api/api_internal.h"

typedef struct export_source export_source;

typedef struct export_form {
    const char *name;   /**< as it is asked for */
    const char *type;   /**< of the content */
    const char *suffix; /**< of the file's name */
    store_result (*start)(export_source *it);
    void (*event)(export_source *it, const store_event *event); /**< NULL: there are none in it */
    void (*events_end)(export_source *it);
    store_result (*series)(export_source *it); /**< some of series `at`, which it moves on */
    void (*end)(export_source *it);
} export_form;

typedef enum export_part { PART_START, PART_EVENTS, PART_SERIES, PART_END, PART_OVER } export_part;

struct export_source {
    http_source source;
    const export_form *form;
    store *store;
    store_run run;
    export_part part;
    store_series *series;
    uint32_t series_count;
    uint32_t series_room;
    uint32_t at; /**< series that is written */
    int64_t block;
    int64_t last_event;
    uint32_t event_count; /**< of the page */
    uint32_t events;      /**< of all */
    json_out out;
    size_t given;
    void *own; /**< a form's, of the request's memory */
    block_point points[BLOCK_POINTS];
    char file_name[STORE_ID_BYTES + 16];
};

extern const export_form export_trace; /**< api_export_trace.c */
extern const export_form export_page;  /**< api_export_page.c */

/** Calls for every document of the run, with its text. */
store_result export_documents(export_source *it, store_document_each *each);
/** Reads the block that is due. Of a series' last one NOT_FOUND comes next, and `at` moves on by itself. */
store_result export_block(export_source *it, uint32_t *count);

#endif /* MSC_SERVER_API_EXPORT_H */
