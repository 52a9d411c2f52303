/* What the running half of libkiln shares: a call from its arguments to its launches. Nothing here is public. */
#ifndef KILN_RUN_H
#define KILN_RUN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "internal.h"

/* ---- text (message.c): appended to a buffer, cut at its end; `used` counts what there would be ---- */
typedef struct { char *text; size_t size, used; } sink;
void kiln_put(sink *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kiln_put_number(sink *s, double value); /* the shortest text that reads back as the same value */
void kiln_put_attr(sink *s, const attr_value *value);
/* Completes a message that was written into error->message through `s`. */
kiln_code kiln_fail_put(kiln_error *error, kiln_code code, const sink *s);
sink kiln_message(kiln_error *error);
/* A hint for a name that is not among `known`. */
void kiln_put_nearest(sink *s, const char *name, const char *const *known, uint32_t count);

/* ---- working memory (work.c): one call's, on its stack, or one decision's, on the heap; zeroed, freed as a whole ---- */
typedef struct work_block work_block;
typedef struct {
  char *at, *end;
  work_block *blocks;
  bool grow;   /* may take memory of the system */
  bool heap;   /* was refused by the system, not by `grow` */
} work;
enum { WORK_STACK = 48 << 10 };
void *kiln_work_get(work *w, size_t count, size_t size); /* NULL: see kiln_work_failed */
kiln_code kiln_work_failed(const work *w, const char *op, kiln_error *error);
void kiln_work_free(work *w);

/* ---- values (evaluate.c) ---- */
typedef struct { bool real; int64_t integer; double value; } number;
typedef struct {
  uintptr_t pointer;
  int64_t shape[KILN_MAX_RANK], strides[KILN_MAX_RANK];
  kiln_dtype dtype;
  int32_t device, rank;
  uint32_t at;              /* index of its address in the call's table */
  bool given, readonly;
} view;
/* The memory an operand covers: rows of `width` elements, `row` apart, elements `col` apart. */
typedef struct {
  bool given;
  uint32_t rank;
  int64_t shape[KILN_MAX_RANK];
  int64_t row, col, itemsize;
} geometry;
/* A checked call of an op: what expressions see. Values of scalars are passed beside it: they change from call to call. */
typedef struct {
  const op_signature *sig;
  const char *op;
  int64_t *dims;            /* per dim of the op, where known */
  bool *known;
  geometry *geometry;       /* per tensor */
  kiln_dtype *dtypes;       /* per tensor; 0: absent */
  uintptr_t *pointers;      /* per tensor: both sides' addresses or-ed, to judge alignment */
  const attr_value *attrs;  /* per attribute */
  bool *missing;            /* per tensor: an output that the caller left out */
  int64_t lead[KILN_MAX_RANK];
  int32_t lead_rank;        /* -1: no operand gives the op's rows */
  bool empty;               /* nothing is to be computed, and nothing launched */
} bound;
kiln_code kiln_evaluate(const expr *e, const bound *b, const number *args, number *out, kiln_error *error);
/* Whether 64 bits hold a number without its fraction; that, or -1. */
bool kiln_fits(const number *n);
int64_t kiln_whole(const number *n);
/* KILN_OK: it holds. KILN_SELECTION: it does not, and `why` (if not NULL) says so. Else the error. */
kiln_code kiln_why_not(const expr *pred, const bound *b, const number *args, sink *why, kiln_error *error);
void kiln_render(sink *s, const expr *e);
void kiln_put_value(sink *s, const number *n);
bool kiln_expr_equal(const expr *a, const expr *b);
bool kiln_names_arg(const expr *e, uint32_t scalar); /* whether an expression or predicate names this scalar */
bool kiln_names_args(const expr *e);
int64_t kiln_geometry_rows(const geometry *g);
int64_t kiln_geometry_width(const geometry *g);
int64_t kiln_geometry_extent(const geometry *g); /* bytes from the first element to the end of the last */

/* ---- the library ---- */
typedef struct context context;
typedef struct cuda_driver cuda_driver;
typedef struct cpu_pool cpu_pool;
typedef struct scratch_pool scratch_pool;

/* A kernel or plan of a tree in the order in which it is tried. */
typedef struct {
  const kiln_op *op;
  const manifest_kernel *kernel;   /* or */
  const manifest_plan *plan;
  const char *variant, *tier, *mode, *isa;
  int64_t priority;
  int32_t tier_order, isa_rank;
  const char *refusal;             /* why this device cannot run it at all */
  bool tiles;                      /* whether Linux must be asked, too: see kiln_refused */
  uint32_t id;                     /* of a kernel: its place among a context's functions */
  _Atomic uint64_t runs;
} candidate;

typedef struct provider {
  char *name;
  kiln_provider given;
  bool serves;                     /* its predicate held */
  _Atomic uint64_t runs, declined;
} provider;
typedef struct provider_list {
  struct provider_list *older;     /* kept until the library is freed: a call may be reading it */
  uint32_t count, above;           /* the first `above` go before the tree */
  provider *items[];
} provider_list;

typedef struct name_list {
  struct name_list *older;
  uint32_t count;
  char *names[];
} name_list;

/* An extent that determines a dim: N, or a positive multiple of it. */
typedef struct { int32_t dim; int64_t factor; } axis_rule; /* dim -1: none */

typedef struct decision decision;
typedef struct pack pack;
struct kiln_op {
  kiln_library *library;
  pack *pack;
  const op_signature *sig;
  uint32_t id;                     /* in the manifest of its pack */
  candidate *candidates;           /* in the order in which they are tried */
  uint32_t candidate_count;
  candidate **fast;                /* the same, those of the fast mode first */
  bool *shaping;                   /* per scalar: the choice or the shape of a launch depends on its value */
  bool shaping_known;
  uint32_t depth;                  /* plans within plans below it; 0: not known yet */
  int32_t *bound_dim;              /* per scalar: the dim that it gives, or -1 */
  axis_rule *axes;                 /* KILN_MAX_RANK per tensor */
  decision *_Atomic *_Atomic decisions; /* a table of DECISIONS slots; NULL until the first */
  uint32_t decision_count;
  provider_list *_Atomic providers;
};

/* One manifest of one tree. */
struct pack {
  kiln_tree *tree;
  manifest manifest;
  kiln_op *ops;                    /* as in the manifest */
  uint32_t first_kernel;           /* id of its first kernel */
};

typedef enum { DEVICE_CPU, DEVICE_CUDA, DEVICE_PRETEND } device_kind;

/* See kiln_scratch_counters. */
typedef struct { _Atomic uint64_t blocks, bytes, hits, growths, fills; } scratch_counts;

struct kiln_library {
  kiln_arena *arena;
  kiln_tree **trees; uint32_t tree_count;
  pack *packs; uint32_t pack_count;
  kiln_op **ops; uint32_t op_count; /* sorted by name: the first pack's of each name */
  uint32_t kernel_count;
  device_kind kind;
  char label[160];
  const char *pretended;
  kiln_device device;
  int64_t shared_limit;
  const cpu_features *features;
  int32_t threads;
  bool poison, per_call;
  _Atomic bool sealed, closed;
  _Atomic uint32_t references;      /* the owner, and each bound call */
  _Atomic uint32_t version;         /* changes with what is disabled: part of every decision's key */
  name_list *_Atomic disabled;
  unsigned char *alive;             /* a byte that a forked child sees as 0, or NULL: by the process id */
  int64_t process;
  pthread_mutex_t lock;             /* decisions, loading, registration */
  cpu_pool *pool;
  cuda_driver *driver;
  context *_Atomic contexts;
  scratch_pool *_Atomic scratch;
  scratch_counts scratch_counts[2]; /* of arbitrary content, and zeroed */
  struct sealed_table *_Atomic sealed_table; /* NULL until it is sealed */
};

/* ---- a decision: what a call of one shape does (decide.c) ---- */
typedef struct {
  uint32_t slot;                    /* where it is written */
  uint32_t at;                      /* index into the call's table of addresses */
} pointer_patch;
typedef struct {
  uint32_t slot;
  const expr *value;
  const bound *bound;
  uint32_t args;                    /* where its op's scalars are among the call's numbers */
  const char *dtype, *name;
} scalar_patch;
/* A parameter that is a tensor map, innermost dimension first: what cuTensorMapEncodeTiled is given but the address. */
typedef struct {
  uint32_t slot, at;                /* its parameter, whose slot holds the address it was made for; and as above */
  const tensor_map *map;
  int element;
  uint32_t rank, box[MAP_RANK];
  uint64_t extents[MAP_RANK], pitches[MAP_RANK - 1];
  bool small;
} map_patch;
/* One launch: parameters eight bytes each, constants filled in. */
typedef struct {
  candidate *candidate;
  uint32_t slot_count, ints, floats; /* on the CPU: where integers and floats begin */
  uint64_t *slots;
  pointer_patch *pointers; uint32_t pointer_count;
  scalar_patch *scalars; uint32_t scalar_count;
  map_patch *maps; uint32_t map_count;
  int64_t grid[3];
  int64_t chunks;                   /* CPU: over how many threads rows are split */
} launch;
/* The scalars of a plan's step. */
typedef struct {
  const plan_step *step;
  const op_signature *sig;          /* of the op it calls */
  const bound *bound;               /* of the call that it is a step of */
  uint32_t from, to;                /* that call's scalars and its own among the call's numbers */
} frame;
typedef struct {
  const char *op;
  uint32_t written, other;          /* into the table */
  int64_t a_bytes, b_bytes;
  geometry a, b;
  bool same_is_fine;
  const char *names[2];
} overlap;
/* Where a temporary or scratch lies in its block: the call's scratch, or what is all zeros between launches. */
typedef struct { size_t offset; bool zeroed; } temp_place;
struct decision {
  uint64_t hash;
  uint64_t *key; uint32_t key_words;
  candidate *candidate;             /* NULL: there is nothing to compute */
  const bound *bound;
  uint32_t operands;                /* addresses in the table before those of temporaries */
  uint32_t *aligns;                 /* per operand's address: what the chosen candidates need */
  launch *launches; uint32_t launch_count, launch_room;
  frame *frames; uint32_t frame_count, frame_room;
  overlap *overlaps; uint32_t overlap_count, overlap_room;
  candidate **counted; uint32_t counted_count, counted_room; /* kernels and plans that this call runs */
  temp_place *temps; uint32_t temp_count, temp_room;         /* after the operands' addresses in the table */
  size_t scratch, zeroed;           /* bytes of each kind */
  uint32_t numbers;                 /* scalars of the call, then of its steps */
  work memory;
};
enum { DECISIONS = 2048, SCRATCH_ALIGN = 256 };

/* ---- arguments.c ---- */
typedef struct {
  view *reads, *writes;             /* per tensor */
  number *args;                     /* per scalar */
  attr_value *attrs;                /* per attribute */
  const kiln_tensor **tensors[2];   /* per tensor: what was given to read and to write */
} operands;
kiln_code kiln_sort_arguments(const kiln_op *op, const kiln_argument *arguments, size_t count, work *w, operands *out,
                              kiln_error *error);
kiln_code kiln_check_addresses(const kiln_op *op, const operands *o,
                               kiln_error *error); /* no address is null but that of nothing */
kiln_code kiln_cast_scalar(const char *op, const scalar_operand *o, const kiln_argument *given, number *out, kiln_error *error);
kiln_code kiln_make_view(const char *op, const char *name, const kiln_tensor *t, view *out, kiln_error *error);

/* ---- bind.c ---- */
kiln_code kiln_bind_views(const kiln_op *op, const view *reads, const view *writes, const number *args, const attr_value *attrs,
                          work *w,
                          bound **out, kiln_error *error);
bool kiln_has_no_rows(const bound *b);
/* Refuses a call of which nothing is launched, because `none` is 0, if an output has elements: they would be left as they were made. */
kiln_code kiln_refuse_unwritten(const bound *b, const char *none, kiln_error *error);
/* The same memory in the operand's own rank. */
view kiln_flat_view(const view *v, const geometry *g);

/* ---- select.c ---- */
typedef struct { const char *tier, *variant, *isa; bool fast; } wanted;
kiln_code kiln_wanted(const kiln_op *op, const kiln_choice *choice, wanted *out, kiln_error *error);
/* KILN_OK: it may run. KILN_SELECTION: `why` says why not. Else the error. */
kiln_code kiln_judge(const kiln_op *op, candidate *c, const bound *b, const view *reads, const view *writes, const number *args,
                     const wanted *asked, work *w, sink *why, kiln_error *error);
kiln_code kiln_choose(const kiln_op *op, const bound *b, const view *reads, const view *writes, const number *args,
                      const wanted *asked,
                      work *w, candidate **out, kiln_error *error);
candidate *kiln_candidate_at(const kiln_op *op, const wanted *asked, uint32_t i);
const char *kiln_disabled_by(const kiln_library *library, const candidate *c);
bool kiln_is_disabled(const kiln_library *library, const char *name);

/* ---- tiles.c ---- */
enum { REFUSED_BYTES = 240 };
/* Why a candidate cannot run here at all, in `text` or for good; NULL if it can. */
const char *kiln_refused(const candidate *c, char text[REFUSED_BYTES]);

/* ---- run.c: a call on its way, with its working memory ---- */
typedef struct {
  work w;
  operands given;
  wanted asked;
  _Alignas(16) char space[WORK_STACK];
} request;
/* Whatever it returns, `out->w` is to be freed. */
kiln_code kiln_start(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice, request *out,
                     kiln_error *error);
kiln_code kiln_check_request(const kiln_op *op, const request *r, kiln_stream stream, kiln_error *error);

/* ---- plan.c ---- */
typedef struct {
  const kiln_op *callee;
  view *reads, *writes;
  number *args;
} step_call;
typedef struct {
  const bound *bound;
  view *temps; size_t *temp_bytes;
  view *flat[2];                    /* per tensor of the plan's op: its read and written side in its own rank */
  bool *written[2];                 /* tensors and temps that a step has written */
} plan_frame;
kiln_code kiln_plan_frame(const kiln_op *op, const manifest_plan *plan, const bound *b, const view *reads, const view *writes,
                          const number *args, uint32_t first_temp, work *w, plan_frame *out, kiln_error *error);
/* The operands of the next step; steps must be asked for in order. */
kiln_code kiln_plan_step(const kiln_op *op, plan_frame *f, const plan_step *step, const number *args, work *w, step_call *out,
                         kiln_error *error);
kiln_code kiln_step_args(const char *op, const plan_step *step, const op_signature *callee, const bound *b, const number *args,
                         number *out, kiln_error *error);
const kiln_op *kiln_callee(const kiln_op *op, const plan_step *step);

/* ---- alias.c ---- */
kiln_code kiln_overlap_pairs(const kiln_op *op, const bound *b, const view *reads, const view *writes, const candidate *c,
                             decision *d,
                             kiln_error *error);
kiln_code kiln_check_overlaps(const decision *d, const uintptr_t *table, kiln_error *error);

/* ---- recipe.c ---- */
/* Which promise of a kernel's parameters this call would break. */
kiln_code kiln_why_not_params(const candidate *c, const bound *b, const number *args, sink *why, kiln_error *error);
kiln_code kiln_make_launch(candidate *c, const bound *b, const view *reads, const view *writes, const number *args,
                           uint32_t args_at, decision *d, kiln_error *error); /* appends it to d->launches */
kiln_code kiln_store_scalar(const launch *l, const scalar_patch *p, const number *numbers, uint64_t *slots, kiln_error *error);

/* ---- tensor_map.c ---- */
/* Which rule of the driver a call breaks: presence, extents, strides. Type and address are checked as a pointer's. */
kiln_code kiln_why_not_map(const kernel_param *p, const bound *b, const number *args, sink *why, kiln_error *error);
kiln_code kiln_tile(const kernel_param *p, const bound *b, const number *args, map_patch *out, kiln_error *error);
bool kiln_cuda_makes_maps(const kiln_library *library);
/* Makes a map at `out`, MAP_BYTES at a multiple of MAP_ALIGN. */
kiln_code kiln_cuda_encode(const kiln_library *library, const context *c, const candidate *k, const map_patch *m,
                           uintptr_t address, void *out, kiln_error *error);

/* ---- decide.c ---- */
void *kiln_append(decision *d, void **items, uint32_t *count, uint32_t *room, size_t size); /* NULL: no memory */
void kiln_find_shaping(kiln_op *op);
/* `*held` is to be given to kiln_sealed_done when the decision is no longer used. */
kiln_code kiln_decide(const kiln_op *op, const operands *o, const wanted *asked, work *w, decision *local, const decision **out,
                      void **held, kiln_error *error);
bool kiln_is_key(const decision *d, uint64_t hash, const uint64_t *key, uint32_t words);
/* A decision of its own, in `d`, whose memory is the heap's. */
kiln_code kiln_decide_anew(const kiln_op *op, const operands *o, const wanted *asked, work *w, decision *d, kiln_error *error);
/* The place in the table of another temporary, which lies at `*end` of its block. */
kiln_code kiln_add_temp(decision *d, const char *op, size_t bytes, bool zeroed, size_t *end, uint32_t *at, kiln_error *error);
void kiln_free_decisions(kiln_op *op);

/* ---- decisions of a sealed library (sealed.c) ---- */
typedef struct sealed_table sealed_table;
sealed_table *kiln_sealed_new(void); /* NULL: no memory, and nothing is remembered */
void kiln_sealed_free(sealed_table *table);
/* The decision of a key, found or made in the table; NULL where it cannot be made there. */
const decision *kiln_sealed_decide(sealed_table *table, const kiln_op *op, const operands *o, const wanted *asked, uint64_t hash,
                                   const uint64_t *key, uint32_t words, work *w, void **held);
void kiln_sealed_done(void *held); /* NULL is fine */

/* ---- a launch laid out (prepared.c) ---- */
typedef struct prepared prepared;
struct prepared {
  const decision *decision;
  const launch *launch;
  void *function;
  uint64_t *slots;
  void **params;                    /* CUDA: addresses of the slots, and of tensor maps */
  void *config;                     /* CUDA: the launch configuration */
};
typedef struct {
  const kiln_op *op;
  const decision *decision;
  context *context;
  prepared *launches;
  uintptr_t *table;                 /* addresses read, written, of temporaries */
  number *numbers;
  uintptr_t scratch, zeroed;        /* to which the temporaries' addresses belong */
} prepared_call;
/* Loads what is needed and checks overlaps; the memory of `w` must live as long as the prepared call. */
kiln_code kiln_prepare_call(const kiln_op *op, const decision *d, const operands *o, context *c, kiln_stream stream, work *w,
                            prepared_call *out, kiln_error *error);
kiln_code kiln_fill_numbers(prepared_call *p, kiln_error *error);
kiln_code kiln_fill_pointers(prepared_call *p, kiln_error *error);
kiln_code kiln_go(prepared_call *p, kiln_stream stream, kiln_error *error);
bool kiln_is_forked(const kiln_library *library);
kiln_code kiln_check_alive(const kiln_library *library, kiln_error *error);

/* ---- loading (load.c, context.c) ---- */
struct context {
  context *next;
  void *handle;                     /* CUcontext; NULL on the CPU */
  bool primary;
  void *_Atomic *functions;         /* per kernel id */
  void **modules;                   /* per kernel id: CUmodule, or the handle of dlopen; kernels of one file share it */
};
kiln_code kiln_load_kernel(context *c, const candidate *k, kiln_stream stream, void **function, kiln_error *error);
kiln_code kiln_new_context(kiln_library *library, void *handle, bool primary, context **out, kiln_error *error);
void kiln_close_contexts(kiln_library *library, bool forked);
kiln_code kiln_current_context(kiln_library *library, context **out, kiln_error *error);

/* ---- the CPU (cpu.c, pool.c) ---- */
typedef int64_t cpu_entry(void *const *pointers, const int64_t *integers, const double *floats, int64_t begin, int64_t end);
kiln_code kiln_load_object(const uint8_t *data, size_t bytes, const char *name, void **handle, kiln_error *error);
kiln_code kiln_object_entry(void *handle, const manifest_kernel *k, void **function, kiln_error *error);
kiln_code kiln_cpu_launch(kiln_library *library, const prepared *p, kiln_error *error);
cpu_pool *kiln_pool_new(int32_t threads); /* NULL: no memory */
void kiln_pool_start(cpu_pool *pool);
void kiln_pool_free(cpu_pool *pool, bool forked);
/* Runs an entry over `total` rows in `chunks` parts: the least of its codes that is not 0, or 0. */
int64_t kiln_pool_run(cpu_pool *pool, cpu_entry *entry, uint64_t *slots, uint32_t ints, uint32_t floats, int64_t total,
                      int64_t chunks);
int32_t kiln_cpu_count(void);

/* ---- CUDA (cuda.c; the driver's own types are in driver.h) ---- */
kiln_code kiln_cuda_open(kiln_library *library, int32_t ordinal, const char *driver_path, kiln_error *error);
kiln_code kiln_cuda_check_toolchain(const kiln_library *library, const manifest *m, kiln_error *error);
void kiln_cuda_close(kiln_library *library, bool forked);
/* Makes a context current in this thread until kiln_cuda_leave. */
kiln_code kiln_cuda_enter(const kiln_library *library, const context *c, bool *pushed, kiln_error *error);
void kiln_cuda_leave(const kiln_library *library, bool pushed);
kiln_code kiln_cuda_load(const kiln_library *library, const uint8_t *data, void **module, kiln_error *error);
kiln_code kiln_cuda_function(const kiln_library *library, const manifest_kernel *k, void *module, void **function,
                             kiln_error *error);
void kiln_cuda_unload(const kiln_library *library, void *module);
size_t kiln_cuda_config_bytes(void);
void kiln_cuda_configure(const manifest_kernel *k, const int64_t grid[3], void *config);
kiln_code kiln_cuda_launch(const kiln_library *library, const context *c, const prepared *launches, uint32_t count,
                           kiln_stream stream, kiln_error *error);
kiln_code kiln_cuda_capturing(const kiln_library *library, kiln_stream stream, bool *capturing, kiln_error *error);
kiln_code kiln_cuda_allocate(const kiln_library *library, size_t bytes, kiln_stream stream, uintptr_t *out, kiln_error *error);
/* In the order of the stream, or at once. */
kiln_code kiln_cuda_free(const kiln_library *library, uintptr_t address, kiln_stream stream, kiln_error *error);
kiln_code kiln_cuda_free_now(const kiln_library *library, uintptr_t address, kiln_error *error);
kiln_code kiln_cuda_fill(const kiln_library *library, uintptr_t address, uint8_t value, size_t bytes, kiln_stream stream,
                         kiln_error *error);
kiln_code kiln_cuda_synchronize(const kiln_library *library, kiln_stream stream, kiln_error *error);
/* Blocking copies between host and device, for the self-test. */
kiln_code kiln_cuda_copy(const kiln_library *library, uintptr_t device, void *host, size_t bytes, bool to_device,
                         kiln_error *error);

/* ---- scratch (scratch.c, scratch_set.c) ---- */
/* Without a pool it is the launch's own. */
typedef struct { scratch_pool *pool; uintptr_t address; size_t bytes; } scratch_block;
typedef struct { scratch_block scratch, zeroed; } scratch_lease;
kiln_code kiln_scratch_take(const kiln_op *op, context *c, kiln_stream stream, size_t scratch, size_t zeroed, scratch_lease *out,
                            kiln_error *error);
kiln_code kiln_scratch_give(const kiln_op *op, context *c, kiln_stream stream, scratch_lease *lease, kiln_error *error);
void kiln_scratch_close(kiln_library *library, bool forked);

/* ---- providers (provider.c) ---- */
/* The arguments that a provider is given: every operand that is there, every scalar and attribute. */
typedef struct { kiln_argument *items; size_t count; } argument_list;
kiln_code kiln_list_arguments(const kiln_op *op, const operands *o, work *w, argument_list *out, kiln_error *error);
/* Runs the first provider that serves and does not decline, of those above the tree or of those below. KILN_DECLINED: none did. */
kiln_code kiln_run_providers(const kiln_op *op, const provider_list *list, bool below, const argument_list *arguments,
                             const wanted *asked,
                             kiln_stream stream, kiln_error *error);
void kiln_explain_providers(const provider_list *list, const kiln_library *library, bool below, const wanted *asked, bool *ran,
                            sink *s);
void kiln_free_providers(provider_list *list);

/* ---- library.c ---- */
kiln_code kiln_make_ops(kiln_library *library, kiln_error *error);
void kiln_release(kiln_library *library);
kiln_code kiln_add_disabled(kiln_library *library, const char *name, size_t bytes, bool disabled, kiln_error *error);

/* ---- ed25519.c ---- */
bool kiln_ed25519_verify(const uint8_t key[32], const void *message, size_t bytes, const uint8_t signature[64]);

#endif
