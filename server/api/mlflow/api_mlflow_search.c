/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MLflow's search of runs: what holds of a run's attributes, metrics, params and tags, in an order, by pages.
 *
 * All runs of the experiments are looked at, and of those that hold, what they are ordered by is kept; a page
 * of them is then written. Metrics, params and tags of a run are read only where a clause or the order asks.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api/mlflow/api_mlflow.h"

#define PAGE 1000         /* most runs of a page, whatever is asked for */
#define AT_ONCE 200u      /* runs that are read in one go */
#define MOST_FOUND 10000u /* most runs that hold */
#define MOST_EXPERIMENTS 64u
#define MOST_ORDERS 4u
#define SORTED_BYTES 64u /* of a text that runs are ordered by */

typedef struct order {
    mlflow_name name;
    bool descending;
} order;

typedef struct sort_value {
    bool is_there;
    double number;
    char text[SORTED_BYTES];
} sort_value;

typedef struct found_run {
    store_run run;
    sort_value by[MOST_ORDERS];
} found_run;

typedef struct run_search {
    api_call *call;
    mlflow_filter filter;
    order orders[MOST_ORDERS];
    uint32_t order_count;
    bool active;
    bool deleted;
    found_run *found;
    uint32_t count;
    uint32_t room;
    store_run *read; /* of one go */
    uint32_t read_count;
} run_search;

/* ---- what a run has -------------------------------------------------------------------------- */

typedef struct run_facts {
    const store_run *run;
    json_t *params; /* read when asked for */
    json_t *tags;
    store_result result;
} run_facts;

static const char *find_pair(api_call *call, run_facts *facts, const mlflow_name *name)
{
    bool is_tag = name->kind == MLFLOW_TAG;
    json_t **object = is_tag ? &facts->tags : &facts->params;

    if (is_tag && strcmp(name->key, MLFLOW_RUN_NAME) == 0)
        return facts->run->name;
    if (*object == NULL && facts->result == STORE_OK)
        *object = mlflow_load(call, facts->run->key, is_tag ? "tags" : "params", &facts->result);
    return json_string_value(json_object_get(*object, name->key));
}

static const char *find_text(api_call *call, run_facts *facts, const mlflow_name *name)
{
    if (name->kind != MLFLOW_ATTRIBUTE)
        return find_pair(call, facts, name);
    if (strcmp(name->key, "status") == 0)
        return mlflow_status(facts->run);
    return strcmp(name->key, "run_id") == 0 ? facts->run->id : facts->run->name;
}

static bool is_number(const mlflow_name *name)
{
    return name->kind == MLFLOW_METRIC ||
           (name->kind == MLFLOW_ATTRIBUTE &&
            (strcmp(name->key, "start_time") == 0 || strcmp(name->key, "end_time") == 0 ||
             strcmp(name->key, "created") == 0));
}

/* False: there is none. */
static bool find_number(api_call *call, run_facts *facts, const mlflow_name *name, double *out)
{
    store_series series;
    store_result result;

    if (name->kind == MLFLOW_ATTRIBUTE) {
        bool is_end = strcmp(name->key, "end_time") == 0;

        *out = (double)(is_end ? facts->run->ended_ms : facts->run->created_ms);
        return !is_end || facts->run->ended_ms != STORE_NO_TIME;
    }
    if (strlen(name->key) > STORE_NAME_BYTES)
        return false;
    result = store_series_find(call->it->parts.store, facts->run->key, name->key, &series);
    if (result != STORE_OK && result != STORE_NOT_FOUND)
        facts->result = result;
    *out = result == STORE_OK ? series.summary.last : 0.0;
    return result == STORE_OK;
}

static bool holds(api_call *call, run_facts *facts, const mlflow_filter *filter)
{
    bool good = true;

    for (uint32_t i = 0; i < filter->count && good; i++) {
        const mlflow_clause *clause = &filter->at[i];
        double number;

        if (clause->is_number) {
            good = find_number(call, facts, &clause->name, &number) && mlflow_holds_number(clause, number);
        } else {
            const char *text = find_text(call, facts, &clause->name);

            good = text != NULL && mlflow_holds_text(clause, text);
        }
    }
    return good && facts->result == STORE_OK;
}

static void note_order(api_call *call, run_facts *facts, const mlflow_name *name, sort_value *out)
{
    const char *text;

    if (is_number(name)) {
        out->is_there = find_number(call, facts, name, &out->number) && !isnan(out->number);
        return;
    }
    text = find_text(call, facts, name);
    out->is_there = text != NULL;
    (void)snprintf(out->text, sizeof out->text, "%.63s", text == NULL ? "" : text);
}

/* ---- finding --------------------------------------------------------------------------------- */

static store_result add_found(run_search *search, run_facts *facts)
{
    found_run *into;

    if (search->count == MOST_FOUND)
        return STORE_TOO_MANY;
    if (search->count == search->room) {
        uint32_t room = search->room == 0 ? AT_ONCE : 2 * search->room;
        found_run *grown =
            http_memory_grow(&search->call->request->memory, search->found, room * sizeof *grown);

        if (grown == NULL)
            return STORE_NO_MEMORY;
        search->found = grown;
        search->room = room;
    }
    into = &search->found[search->count++];
    memset(into, 0, sizeof *into);
    into->run = *facts->run;
    for (uint32_t i = 0; i < search->order_count; i++)
        note_order(search->call, facts, &search->orders[i].name, &into->by[i]);
    return facts->result;
}

static store_result look_at(run_search *search, const store_run *run)
{
    run_facts facts = {.run = run, .result = STORE_OK};

    if (holds(search->call, &facts, &search->filter))
        facts.result = add_found(search, &facts);
    json_decref(facts.params);
    json_decref(facts.tags);
    return facts.result;
}

static bool note_run(void *user, const store_run *run)
{
    run_search *search = user;

    search->read[search->read_count++] = *run;
    return search->read_count < AT_ONCE;
}

/* Runs of a project are noted before they are looked at: a reader is not held meanwhile. */
static store_result search_project(run_search *search, store_runs_query *query)
{
    store_result result = STORE_OK;

    do {
        search->read_count = 0;
        result = store_runs(search->call->it->parts.store, query, note_run, search);
        if (result == STORE_STOPPED)
            result = STORE_OK;
        for (uint32_t i = 0; i < search->read_count && result == STORE_OK; i++)
            result = look_at(search, &search->read[i]);
        if (search->read_count > 0) {
            query->resumes = true;
            query->after_key = search->read[search->read_count - 1].key;
            query->after_ms = search->read[search->read_count - 1].created_ms;
        }
    } while (result == STORE_OK && search->read_count == AT_ONCE);
    return result;
}

static store_result search_experiment(run_search *search, int64_t project)
{
    store_result result = STORE_OK;

    for (int archived = 0; archived < 2 && result == STORE_OK; archived++) {
        store_runs_query query = {.who = api_who(search->call),
                                  .project = project,
                                  .now_ms = search->call->now_ms,
                                  .state = STORE_ANY,
                                  .archived = archived == 1,
                                  .sort = STORE_BY_CREATED,
                                  .descending = true,
                                  .limit = AT_ONCE};

        if (archived == 1 ? search->deleted : search->active)
            result = search_project(search, &query);
    }
    return result == STORE_NOT_FOUND ? STORE_OK : result; /* an experiment that there is not has no runs */
}

/* ---- order ----------------------------------------------------------------------------------- */

static int compare_values(const order *by, const sort_value *one, const sort_value *other)
{
    int sign = by->descending ? -1 : 1;
    int letters;

    if (one->is_there != other->is_there)
        return one->is_there ? -1 : 1; /* those without are last, either way */
    if (is_number(&by->name))
        return one->number < other->number ? -sign : one->number > other->number ? sign : 0;
    letters = strcmp(one->text, other->text);
    return letters < 0 ? -sign : letters > 0 ? sign : 0;
}

/* qsort has no room for what runs are ordered by, so this sorts by merging. */
static bool comes_first(const run_search *search, uint32_t one, uint32_t other)
{
    const found_run *left = &search->found[one];
    const found_run *right = &search->found[other];

    for (uint32_t i = 0; i < search->order_count; i++) {
        int found = compare_values(&search->orders[i], &left->by[i], &right->by[i]);

        if (found != 0)
            return found < 0;
    }
    if (left->run.created_ms != right->run.created_ms)
        return left->run.created_ms > right->run.created_ms;
    return strcmp(left->run.id, right->run.id) <= 0;
}

static void merge(const run_search *search, const uint32_t *from, uint32_t *into, uint32_t width)
{
    for (uint32_t begin = 0; begin < search->count; begin += 2 * width) {
        uint32_t middle = begin + width < search->count ? begin + width : search->count;
        uint32_t end = begin + 2 * width < search->count ? begin + 2 * width : search->count;
        uint32_t left = begin;
        uint32_t right = middle;

        for (uint32_t at = begin; at < end; at++) {
            bool takes_left = left < middle && (right == end || comes_first(search, from[left], from[right]));

            into[at] = takes_left ? from[left++] : from[right++];
        }
    }
}

/* The places of the runs in their order; NULL: no memory. */
static const uint32_t *sorted(const run_search *search)
{
    http_memory *memory = &search->call->request->memory;
    uint32_t *places = http_memory_get(memory, search->count * sizeof *places);
    uint32_t *others = http_memory_get(memory, search->count * sizeof *others);

    if (places == NULL || others == NULL)
        return NULL;
    for (uint32_t i = 0; i < search->count; i++)
        places[i] = i;
    for (uint32_t width = 1; width < search->count; width *= 2) {
        uint32_t *merged = others;

        merge(search, places, merged, width);
        others = places;
        places = merged;
    }
    return places;
}

/* ---- the request ----------------------------------------------------------------------------- */

static bool read_view(api_call *call, run_search *search)
{
    const char *view;

    if (!mlflow_text(call, "run_view_type", 0, 32, &view))
        return false;
    search->active = view == NULL || strcmp(view, "DELETED_ONLY") != 0;
    search->deleted = view != NULL && strcmp(view, "ACTIVE_ONLY") != 0;
    return view == NULL || strcmp(view, "ALL") == 0 || search->active != search->deleted ||
           mlflow_invalid(call, "run_view_type", view, "ACTIVE_ONLY, DELETED_ONLY, ALL");
}

static bool read_search(api_call *call, run_search *search)
{
    const json_t *orders = json_object_get(call->body, "order_by");
    const char *text;
    const char *wrong;

    if (!read_view(call, search) || !mlflow_text(call, "filter", 0, MLFLOW_TEXT_BYTES, &text))
        return false;
    wrong = mlflow_filter_read(text == NULL ? "" : text, &search->filter);
    if (wrong != NULL)
        return mlflow_invalid(call, "filter", text, wrong);
    if (json_array_size(orders) > MOST_ORDERS)
        return mlflow_invalid(call, "order_by", NULL, "at most 4");
    for (size_t i = 0; i < json_array_size(orders); i++) {
        order *into = &search->orders[search->order_count++];

        text = json_string_value(json_array_get(orders, i));
        wrong = mlflow_order_read(text == NULL ? "" : text, &into->name, &into->descending);
        if (wrong != NULL)
            return mlflow_invalid(call, "order_by", text, wrong);
    }
    return true;
}

/* Runs of all experiments that are named. False: answered. */
static bool find_runs(api_call *call, run_search *search)
{
    const json_t *experiments = json_object_get(call->body, "experiment_ids");
    store_result result = STORE_OK;

    if (!json_is_array(experiments) || json_array_size(experiments) > MOST_EXPERIMENTS)
        return mlflow_invalid(call, "experiment_ids", NULL, "a list of at most 64");
    for (size_t i = 0; i < json_array_size(experiments) && result == STORE_OK; i++) {
        const char *id = json_string_value(json_array_get(experiments, i));
        int64_t project;

        if (id == NULL)
            return mlflow_invalid(call, "experiment_ids", NULL, "texts of digits");
        if (!mlflow_experiment_id(call, id, &project))
            return false;
        result = search_experiment(search, project);
    }
    if (result == STORE_TOO_MANY)
        return mlflow_invalid(call, "filter", NULL, "one that at most 10000 runs hold");
    if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

static void send_page(api_call *call, const run_search *search, int64_t begin, int64_t limit)
{
    const uint32_t *places = sorted(search);
    json_out out = api_json(call);
    store_result result = places == NULL ? STORE_NO_MEMORY : STORE_OK;

    out_open(&out, NULL, '{');
    out_open(&out, "runs", '[');
    for (int64_t i = begin; i < search->count && i < begin + limit && result == STORE_OK; i++)
        result = mlflow_write_run(call, &out, NULL, &search->found[places[i]].run);
    out_close(&out, ']');
    mlflow_write_next(&out, begin + limit, begin + limit < search->count);
    out_close(&out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}

void mlflow_search_runs(api_call *call)
{
    run_search *search = http_memory_get(&call->request->memory, sizeof *search);
    store_run *read = http_memory_get(&call->request->memory, AT_ONCE * sizeof *read);
    int64_t begin;
    int64_t limit;

    if (search == NULL || read == NULL) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return;
    }
    search->call = call;
    search->read = read;
    if (mlflow_page(call, PAGE, &begin, &limit) && read_search(call, search) && find_runs(call, search))
        send_page(call, search, begin, limit);
}
