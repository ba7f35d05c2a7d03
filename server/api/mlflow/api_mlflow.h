/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file api_mlflow.h MLflow's tracking API on our projects and runs: what its files share. Of `api` alone.
 *
 *      experiment      a project; "0" is the project "Default", which its first run makes
 *      run             a run; a deleted one is archived
 *      metric          a series
 *      params, tags    the documents `params` and `tags`
 */
#ifndef MSC_SERVER_API_MLFLOW_H
#define MSC_SERVER_API_MLFLOW_H

#include "api/api_internal.h"

#define MLFLOW_KEY_BYTES 250u /* of a parameter or tag */
#define MLFLOW_TEXT_BYTES 8000u
#define MLFLOW_CLAUSES 16u
#define MLFLOW_RUN_NAME "mlflow.runName"

/* ---- input and answers (api_mlflow.c) -------------------------------------------------------- */

/** 400 for a field. Returns false. */
bool mlflow_invalid(api_call *call, const char *field, const char *value, const char *allowed);
/** `{}` */
void mlflow_send_nothing(api_call *call);
/**
 * A text of the body, or of the query where there is no body. `*out` NULL: it is not there, which is refused
 * if `least` is not 0.
 */
bool mlflow_text(api_call *call, const char *name, size_t least, size_t most, const char **out);
/** An integer, as a number or as its digits. `*out` stays where there is none. */
bool mlflow_integer(api_call *call, const json_t *object, const char *name, int64_t least, int64_t most,
                    int64_t *out);
/** `run_id`, or `run_uuid` of older clients. */
bool mlflow_find_run(api_call *call, store_run *run);
store_run_ref mlflow_ref(const api_call *call, const char *id);
/** The body's or query's page: where it begins and how much it may have, at most `most`. */
bool mlflow_page(api_call *call, int64_t most, int64_t *begin, int64_t *limit);
void mlflow_write_next(json_out *out, int64_t begin, bool has_next);

/* ---- what is asked for (api_mlflow_filter.c), which knows nothing but text ---- */

typedef enum mlflow_kind { MLFLOW_ATTRIBUTE, MLFLOW_METRIC, MLFLOW_PARAM, MLFLOW_TAG } mlflow_kind;
typedef enum mlflow_compare {
    MLFLOW_EQUAL,
    MLFLOW_UNEQUAL,
    MLFLOW_LESS,
    MLFLOW_AT_MOST,
    MLFLOW_MORE,
    MLFLOW_AT_LEAST,
    MLFLOW_LIKE,
    MLFLOW_ILIKE
} mlflow_compare;

typedef struct mlflow_name {
    mlflow_kind kind;
    char key[MLFLOW_KEY_BYTES + 1];
} mlflow_name;

typedef struct mlflow_clause {
    mlflow_name name;
    mlflow_compare compare;
    bool is_number;
    double number;
    char text[MLFLOW_KEY_BYTES + 1];
} mlflow_clause;

typedef struct mlflow_filter {
    uint32_t count;
    mlflow_clause at[MLFLOW_CLAUSES]; /**< all must hold */
} mlflow_filter;

/** Reads clauses with AND between them. NULL, or what is wrong as a sentence. */
const char *mlflow_filter_read(const char *text, mlflow_filter *out);
/** Reads "metrics.loss DESC". NULL, or what is wrong as a sentence. */
const char *mlflow_order_read(const char *text, mlflow_name *name, bool *descending);
bool mlflow_holds_text(const mlflow_clause *clause, const char *value);
bool mlflow_holds_number(const mlflow_clause *clause, double value);

/* ---- runs (api_mlflow_runs.c) ---------------------------------------------------------------- */

/** A run with its latest metrics, params and tags. */
store_result mlflow_write_run(api_call *call, json_out *out, const char *key, const store_run *run);
/** A document of texts by name, to be given back; empty where there is none. NULL: no memory. */
json_t *mlflow_load(api_call *call, int64_t run, const char *name, store_result *result);
const char *mlflow_status(const store_run *run);
/** Gives a run another name; `run` is filled anew. False: answered. */
bool mlflow_rename(api_call *call, store_run *run, const char *name);

/* ---- params and tags (api_mlflow_log.c): lists of {key, value}, or NULL ---- */

/** False: answered. */
bool mlflow_check_pairs(api_call *call, const char *name, const json_t *pairs);
/** Keeps what was checked. False: answered. */
bool mlflow_keep_pairs(api_call *call, store_run *run, const json_t *params, const json_t *tags);

/* ---- handlers -------------------------------------------------------------------------------- */

void mlflow_create_experiment(api_call *call);
void mlflow_experiment(api_call *call);
void mlflow_experiment_by_name(api_call *call);
void mlflow_search_experiments(api_call *call);
/** Name and id of an experiment's project; that of "0" need not be there, and has id 0 here. False: answered. */
bool mlflow_project(api_call *call, const char *id, char name[STORE_NAME_BYTES + 1], int64_t *project);
/** An experiment's project, which need not be there. False: answered. */
bool mlflow_experiment_id(api_call *call, const char *id, int64_t *project);
void mlflow_create_run(api_call *call);
void mlflow_run(api_call *call);
void mlflow_update_run(api_call *call);
void mlflow_delete_run(api_call *call);
void mlflow_restore_run(api_call *call);
void mlflow_log_metric(api_call *call);
void mlflow_log_parameter(api_call *call);
void mlflow_log_batch(api_call *call);
void mlflow_set_tag(api_call *call);
void mlflow_delete_tag(api_call *call);
void mlflow_history(api_call *call);
void mlflow_search_runs(api_call *call);

#endif /* MSC_SERVER_API_MLFLOW_H */
