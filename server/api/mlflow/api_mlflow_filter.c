/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The language of searches, as far as it is answered here:
 *
 *      clause { AND clause }
 *      clause  name (= != < <= > >= LIKE ILIKE) value
 *      name    [attributes. | metrics. | params. | tags.] key      key: a word, or between ` or "
 *      value   a number, or a text between ' or "
 *
 * Metrics are compared with numbers, attributes of time too, and all else with texts.
 */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api/mlflow/api_mlflow.h"

static const struct {
    const char *name;
    mlflow_kind kind;
} kinds[] = {{"attributes", MLFLOW_ATTRIBUTE},
             {"attribute", MLFLOW_ATTRIBUTE},
             {"attr", MLFLOW_ATTRIBUTE},
             {"run", MLFLOW_ATTRIBUTE},
             {"metrics", MLFLOW_METRIC},
             {"metric", MLFLOW_METRIC},
             {"params", MLFLOW_PARAM},
             {"parameters", MLFLOW_PARAM},
             {"parameter", MLFLOW_PARAM},
             {"param", MLFLOW_PARAM},
             {"tags", MLFLOW_TAG},
             {"tag", MLFLOW_TAG}};

/* Longer ones before those that they begin with. */
static const struct {
    const char *sign;
    mlflow_compare compare;
} signs[] = {{"!=", MLFLOW_UNEQUAL}, {"<=", MLFLOW_AT_MOST}, {">=", MLFLOW_AT_LEAST},
             {"=", MLFLOW_EQUAL},    {"<", MLFLOW_LESS},     {">", MLFLOW_MORE}};

static const char *skip(const char *at)
{
    while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')
        at++;
    return at;
}

static bool is_word_letter(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '.' || c == '-' || c == '/' ||
           ((unsigned char)c & 0x80) != 0;
}

/* A word of the language, whatever its case; NULL: there is another. */
static const char *take_word(const char *at, const char *word)
{
    size_t bytes = strlen(word);

    return strncasecmp(at, word, bytes) == 0 && !is_word_letter(at[bytes]) ? at + bytes : NULL;
}

/* What stands between two of the sign at `at`; NULL: it does not end, or is too long. */
static const char *take_quoted(const char *at, char *into)
{
    char sign = *at++;
    const char *end = strchr(at, sign);

    if (end == NULL || (size_t)(end - at) > MLFLOW_KEY_BYTES)
        return NULL;
    memcpy(into, at, (size_t)(end - at));
    into[end - at] = '\0';
    return end + 1;
}

/* A key, with the kind before it where there is one. NULL: there is none. */
static const char *take_name(const char *at, mlflow_name *name)
{
    size_t bytes = 0;

    name->kind = MLFLOW_ATTRIBUTE;
    for (size_t i = 0; i < API_COUNT(kinds); i++) {
        size_t length = strlen(kinds[i].name);

        if (strncmp(at, kinds[i].name, length) == 0 && at[length] == '.') {
            name->kind = kinds[i].kind;
            at += length + 1;
            break;
        }
    }
    if (*at == '`' || *at == '"')
        return take_quoted(at, name->key);
    while (is_word_letter(at[bytes]))
        bytes++;
    if (bytes == 0 || bytes > MLFLOW_KEY_BYTES)
        return NULL;
    memcpy(name->key, at, bytes);
    name->key[bytes] = '\0';
    return at + bytes;
}

static const char *take_compare(const char *at, mlflow_compare *compare)
{
    const char *after;

    for (size_t i = 0; i < API_COUNT(signs); i++) {
        if (strncmp(at, signs[i].sign, strlen(signs[i].sign)) == 0) {
            *compare = signs[i].compare;
            return at + strlen(signs[i].sign);
        }
    }
    *compare = MLFLOW_LIKE;
    after = take_word(at, "LIKE");
    if (after == NULL) {
        *compare = MLFLOW_ILIKE;
        after = take_word(at, "ILIKE");
    }
    return after;
}

static const char *take_value(const char *at, mlflow_clause *clause)
{
    char *end = NULL;

    clause->is_number = *at != '\'' && *at != '"';
    if (!clause->is_number)
        return take_quoted(at, clause->text);
    clause->number = strtod(at, &end);
    if (end == at || end != at + strspn(at, "+-.0123456789eE")) /* names of numbers, hexadecimal ones */
        return NULL;
    return is_word_letter(*end) || !isfinite(clause->number) ? NULL : end;
}

static bool is_time(const mlflow_name *name)
{
    return name->kind == MLFLOW_ATTRIBUTE &&
           (strcmp(name->key, "start_time") == 0 || strcmp(name->key, "end_time") == 0 ||
            strcmp(name->key, "created") == 0);
}

static bool is_text_attribute(const mlflow_name *name)
{
    static const char *const names[] = {"status", "run_name", "run_id", "name"};

    for (size_t i = 0; i < API_COUNT(names); i++)
        if (strcmp(names[i], name->key) == 0)
            return true;
    return false;
}

/* NULL, or why the clause makes no sense. */
static const char *check_name(const mlflow_name *name)
{
    if (name->kind == MLFLOW_ATTRIBUTE && !is_time(name) && !is_text_attribute(name))
        return "an attribute is one of status, run_name, run_id, start_time, end_time; of an experiment, "
               "name";
    return NULL;
}

static const char *check_clause(const mlflow_clause *clause)
{
    bool wants_number = clause->name.kind == MLFLOW_METRIC || is_time(&clause->name);

    if (check_name(&clause->name) != NULL)
        return check_name(&clause->name);
    if (wants_number != clause->is_number)
        return wants_number ? "a metric or a time is compared with a number"
                            : "this is compared with a text in quotes";
    if (wants_number && clause->compare >= MLFLOW_LIKE)
        return "a number is compared by =, !=, <, <=, > or >=";
    if (!wants_number && clause->compare >= MLFLOW_LESS && clause->compare <= MLFLOW_AT_LEAST)
        return "a text is compared by =, !=, LIKE or ILIKE";
    return NULL;
}

const char *mlflow_filter_read(const char *text, mlflow_filter *out)
{
    static const char form[] = "clauses like metrics.loss < 0.5, params.lr = '0.1', with AND between them";
    const char *at = skip(text);

    out->count = 0;
    while (*at != '\0') {
        mlflow_clause *clause = &out->at[out->count];
        const char *wrong;

        if (out->count == MLFLOW_CLAUSES)
            return "at most 16 clauses";
        if (out->count > 0 && (at = take_word(at, "AND")) == NULL)
            return form;
        at = take_name(skip(at), &clause->name);
        at = at == NULL ? NULL : take_compare(skip(at), &clause->compare);
        at = at == NULL ? NULL : take_value(skip(at), clause);
        if (at == NULL)
            return form;
        wrong = check_clause(clause);
        if (wrong != NULL)
            return wrong;
        out->count++;
        at = skip(at);
    }
    return NULL;
}

const char *mlflow_order_read(const char *text, mlflow_name *name, bool *descending)
{
    const char *at = take_name(skip(text), name);
    const char *after;

    *descending = false;
    if (at == NULL)
        return "a name like metrics.loss or attributes.start_time, with ASC or DESC behind it";
    at = skip(at);
    after = take_word(at, "DESC");
    *descending = after != NULL;
    if (after == NULL)
        after = take_word(at, "ASC");
    if (*skip(after == NULL ? at : after) != '\0')
        return "a name like metrics.loss or attributes.start_time, with ASC or DESC behind it";
    return check_name(name);
}

/* ---- what holds ------------------------------------------------------------------------------ */

static bool same_letter(char one, char other, bool any_case)
{
    return one == other || (any_case && tolower((unsigned char)one) == tolower((unsigned char)other));
}

/* Matches % and _ of a pattern. Where the rest behind a % does not fit, the % takes one more. */
static bool is_like(const char *pattern, const char *value, bool any_case)
{
    const char *back_pattern = NULL;
    const char *back_value = NULL;

    while (*value != '\0') {
        if (*pattern == '%') {
            back_pattern = ++pattern;
            back_value = value;
        } else if (*pattern != '\0' && (*pattern == '_' || same_letter(*pattern, *value, any_case))) {
            pattern++;
            value++;
        } else if (back_pattern != NULL) {
            pattern = back_pattern;
            value = ++back_value;
        } else {
            return false;
        }
    }
    while (*pattern == '%')
        pattern++;
    return *pattern == '\0';
}

bool mlflow_holds_text(const mlflow_clause *clause, const char *value)
{
    switch (clause->compare) {
    case MLFLOW_EQUAL:
        return strcmp(clause->text, value) == 0;
    case MLFLOW_UNEQUAL:
        return strcmp(clause->text, value) != 0;
    case MLFLOW_LIKE:
        return is_like(clause->text, value, false);
    case MLFLOW_ILIKE:
        return is_like(clause->text, value, true);
    default:
        return false;
    }
}

bool mlflow_holds_number(const mlflow_clause *clause, double value)
{
    switch (clause->compare) {
    case MLFLOW_EQUAL:
        return value == clause->number;
    case MLFLOW_UNEQUAL:
        return value != clause->number;
    case MLFLOW_LESS:
        return value < clause->number;
    case MLFLOW_AT_MOST:
        return value <= clause->number;
    case MLFLOW_MORE:
        return value > clause->number;
    case MLFLOW_AT_LEAST:
        return value >= clause->number;
    default:
        return false;
    }
}
