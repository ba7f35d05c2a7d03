/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Entries`: what some dictionaries hold at one moment, and whether they hold the same later.
 *
 *     places   {a: x, b: y}      {}      {c: z}
 *     pairs     a x  b y                  c z        keys and values, in order
 *     ends               2       2            3      of each place: where its last entry ends
 *
 * A recompute asks this of every module of its call, before it and after it. As a rule nothing has changed, and then the same
 * objects are at the same places: no value is compared, no code of Python runs, nothing is allocated. Where one differs
 * the caller looks for itself; equal values that are other objects differ here.
 *
 * Keys and values are held, so an address cannot come to be another object's. What is of the type `ours` is passed over: it
 * comes and goes between a forward and its recompute.
 *
 * A place of another type than dict may keep its order elsewhere (`OrderedDict`), or not be a dictionary at all (the registries
 * of scripted modules): it is read by its `items`.
 */
#include "py_entries.h"

#include "convert.h"

typedef struct entries_object {
    PyObject_HEAD PyObject *ours; /* a type */
    PyObject *places;             /* a tuple */
    PyObject **pairs;             /* 2 * `count` */
    size_t *ends;                 /* one for each place */
    size_t count;
    size_t capacity;
} entries_object;

/** Where the entries of a place begin. */
static size_t begin_of(const entries_object *self, size_t place)
{
    return place == 0 ? 0 : self->ends[place - 1];
}

static size_t place_count(const entries_object *self)
{
    return self->places != NULL ? (size_t)PyTuple_Size(self->places) : 0;
}

static bool is_ours(const entries_object *self, PyObject *value)
{
    return PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)self->ours) != 0;
}

/** Whether `PyDict_Next` gives all entries of a place in their order. */
static bool is_plain(PyObject *place)
{
    return PyDict_CheckExact(place) || (PyDict_Check(place) && PyDict_Size(place) == 0);
}

/** Is given an entry. False: no more are wanted, or an exception. */
typedef bool entry_use(void *context, PyObject *key, PyObject *value);

/** Gives all entries of a place in their order. False: `use` has said so, or an exception. */
static bool each_entry(PyObject *place, entry_use *use, void *context)
{
    PyObject *key = NULL;
    PyObject *value = NULL;
    PyObject *items;
    Py_ssize_t position = 0;
    bool goes_on = true;

    if (is_plain(place)) {
        while (goes_on && PyDict_Next(place, &position, &key, &value))
            goes_on = use(context, key, value);
        return goes_on;
    }
    items = PyMapping_Items(place);
    goes_on = items != NULL;
    for (Py_ssize_t i = 0; goes_on && i < PyList_Size(items); i++) {
        PyObject *item = PyList_GetItem(items, i);

        key = PyTuple_GetItem(item, 0);
        value = key != NULL ? PyTuple_GetItem(item, 1) : NULL;
        goes_on = value != NULL && use(context, key, value);
    }
    Py_XDECREF(items);
    return goes_on;
}

/* ---- noting ------------------------------------------------------------------------------------- */

/** False with an exception. */
static bool add(void *context, PyObject *key, PyObject *value)
{
    entries_object *self = (entries_object *)context;

    if (self->count == self->capacity) {
        size_t wanted = self->capacity == 0 ? 64 : 2 * self->capacity;
        PyObject **grown = PyMem_Realloc((void *)self->pairs, 2 * wanted * sizeof(PyObject *));

        if (grown == NULL) {
            (void)PyErr_NoMemory();
            return false;
        }
        self->pairs = grown;
        self->capacity = wanted;
    }
    self->pairs[2 * self->count] = Py_NewRef(key);
    self->pairs[2 * self->count + 1] = Py_NewRef(value);
    self->count++;
    return true;
}

static bool note_all(entries_object *self)
{
    size_t places = place_count(self);

    self->ends = PyMem_Calloc(places + 1, sizeof(size_t));
    if (self->ends == NULL) {
        (void)PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < places; i++) {
        if (!each_entry(PyTuple_GetItem(self->places, (Py_ssize_t)i), add, self))
            return false;
        self->ends[i] = self->count;
    }
    return true;
}

static PyObject *entries_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"places", "ours", NULL};
    PyObject *places = NULL;
    PyObject *ours = NULL;
    entries_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:Entries", names, &places, &PyType_Type, &ours))
        return NULL;
    places = PySequence_Tuple(places);
    if (places == NULL)
        return NULL;
    self = (entries_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(places);
        return NULL;
    }
    self->ours = Py_NewRef(ours);
    self->places = places;
    if (!note_all(self)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int entries_traverse(PyObject *object, visitproc visit, void *arg)
{
    entries_object *self = (entries_object *)object;

    Py_VISIT((PyObject *)Py_TYPE(object));
    Py_VISIT(self->ours);
    Py_VISIT(self->places);
    for (size_t i = 0; i < 2 * self->count; i++)
        Py_VISIT(self->pairs[i]);
    return 0;
}

/** Drops what is held. It has no entries and no places from then on. */
static int entries_clear(PyObject *object)
{
    entries_object *self = (entries_object *)object;
    size_t count = self->count;

    self->count = 0;
    for (size_t i = 0; i < 2 * count; i++)
        Py_CLEAR(self->pairs[i]);
    Py_CLEAR(self->places);
    Py_CLEAR(self->ours);
    return 0;
}

static void entries_dealloc(PyObject *object)
{
    entries_object *self = (entries_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    (void)entries_clear(object);
    PyMem_Free((void *)self->pairs);
    PyMem_Free(self->ends);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* ---- comparing ---------------------------------------------------------------------------------- */

/** How far a place has been compared. */
typedef struct comparison {
    const entries_object *self;
    size_t at; /* the next noted entry */
    size_t end;
} comparison;

static void pass_ours(comparison *walk)
{
    while (walk->at < walk->end && is_ours(walk->self, walk->self->pairs[2 * walk->at + 1]))
        walk->at++;
}

static bool is_next(const comparison *walk, PyObject *key, PyObject *value)
{
    PyObject *const *pairs = walk->self->pairs;

    return walk->at < walk->end && pairs[2 * walk->at] == key && pairs[2 * walk->at + 1] == value;
}

/** Goes past an entry, which is the next noted one or ours. False: neither. */
static bool passes(void *context, PyObject *key, PyObject *value)
{
    comparison *walk = (comparison *)context;

    if (!is_next(walk, key, value)) {
        if (is_ours(walk->self, value))
            return true;
        pass_ours(walk);
        if (!is_next(walk, key, value))
            return false;
    }
    walk->at++;
    return true;
}

/** False with or without an exception. */
static bool is_same(const entries_object *self, PyObject *place, size_t begin, size_t end)
{
    comparison walk = {self, begin, end};

    if (!each_entry(place, passes, &walk))
        return false;
    pass_ours(&walk);
    return walk.at == walk.end;
}

static PyObject *entries_same(PyObject *object, PyObject *unused)
{
    const entries_object *self = (const entries_object *)object;
    size_t places = place_count(self);
    bool same = true;

    (void)unused;
    for (size_t i = 0; same && i < places; i++) {
        PyObject *place = PyTuple_GetItem(self->places, (Py_ssize_t)i);

        same = is_same(self, place, begin_of(self, i), self->ends[i]);
    }
    return PyErr_Occurred() != NULL ? NULL : Py_NewRef(same ? Py_True : Py_False);
}

/* ---- reading ------------------------------------------------------------------------------------ */

MSC_PY_SIGNATURE(held, 1, 1, "place");

MSC_PY_FASTCALL(entries_held)
{
    const entries_object *entries = (const entries_object *)self;
    PyObject *values[1];
    PyObject *result;
    uint32_t place = 0;

    if (!msc__py_bind(&held_signature, args, nargs, kwnames, values) ||
        !msc__py_to_u32(values[0], "place", UINT32_MAX, &place))
        return NULL;
    if (place >= place_count(entries))
        return PyErr_Format(PyExc_IndexError, "there is no place %lu", (unsigned long)place);
    result = PyDict_New();
    for (size_t i = begin_of(entries, place); result != NULL && i < entries->ends[place]; i++)
        if (PyDict_SetItem(result, entries->pairs[2 * i], entries->pairs[2 * i + 1]) < 0)
            Py_CLEAR(result);
    return result;
}

/** 1: the entry is to be shown; 0; -1 with an exception. */
static int is_shown(const entries_object *self, PyObject *const *pair, PyObject *without, PyObject *opaque)
{
    int found = PySet_Contains(opaque, (PyObject *)Py_TYPE(pair[1]));

    if (found == 0)
        found = PySet_Contains(without, pair[0]);
    return found < 0 ? -1 : found == 0 && !is_ours(self, pair[1]);
}

MSC_PY_SIGNATURE(values, 4, 4, "first", "last", "without", "opaque");

MSC_PY_FASTCALL(entries_values)
{
    const entries_object *entries = (const entries_object *)self;
    PyObject *values[4];
    PyObject *result;
    uint32_t first = 0;
    uint32_t last = 0;

    if (!msc__py_bind(&values_signature, args, nargs, kwnames, values) ||
        !msc__py_to_u32(values[0], "first", UINT32_MAX, &first) ||
        !msc__py_to_u32(values[1], "last", UINT32_MAX, &last))
        return NULL;
    if (first > last || last > place_count(entries))
        return PyErr_Format(PyExc_IndexError, "there are no places %lu to %lu", (unsigned long)first,
                            (unsigned long)last);
    result = PyList_New(0);
    for (size_t i = begin_of(entries, first); result != NULL && i < begin_of(entries, last); i++) {
        int shown = is_shown(entries, &entries->pairs[2 * i], values[2], values[3]);

        if (shown < 0 || (shown == 1 && PyList_Append(result, entries->pairs[2 * i + 1]) < 0))
            Py_CLEAR(result);
    }
    return result;
}

static PyMethodDef entries_methods[] = {
    {"same", entries_same, METH_NOARGS,
     "same($self, /)\n--\n\nWhether the places hold the same objects in the same order."},
    MSC_PY_METHOD("held", entries_held, 0, "held($self, /, place)\n--\n\nWhat a place held, as a dict."),
    MSC_PY_METHOD("values", entries_values, 0,
                  "values($self, /, first, last, without, opaque)\n--\n\n"
                  "Values of some places, but for some names and types."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entries_slots[] = {
    {Py_tp_new, entries_new},
    {Py_tp_dealloc, entries_dealloc},
    {Py_tp_traverse, entries_traverse},
    {Py_tp_clear, entries_clear},
    {Py_tp_methods, entries_methods},
    {Py_tp_doc, "What some dictionaries hold at one moment, to be compared by identity."},
    {0, NULL},
};

static PyType_Spec entries_spec = {
    .name = "memscale._core.Entries",
    .basicsize = sizeof(entries_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = entries_slots,
};

PyTypeObject *msc__py_entries_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &entries_spec, NULL);
}
