/* libkiln: runs verified trees of ahead-of-time compiled kernels. C11, no dependency; libcuda is opened at run time when a CUDA
 * device is asked for.
 *
 *   kiln_error error = {0};
 *   kiln_library *library;
 *   if (kiln_open(&(kiln_options){.root = "aot_artifacts", .device = "cpu"}, &library, &error)) die(error.message);
 *   const kiln_op *norm = kiln_find(library, "rms_norm", &error);
 *   kiln_argument arguments[] = {KILN_TENSOR("x", x), KILN_TENSOR("weight", w), KILN_NUMBER("eps", 1e-6), KILN_TENSOR("out", y)};
 *   kiln_run(norm, arguments, 4, NULL, NULL, &error);
 *   kiln_close(library);
 *
 * Every call returns KILN_OK or what kind of thing was wrong, with a sentence in the caller's kiln_error. No call ends the process,
 * prints, or changes global state. A library may be used by any number of threads; a kiln_call by one at a time. */
#ifndef KILN_H
#define KILN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KILN_VERSION "0.1.0"
#if defined(KILN_BUILD)
#define KILN_API __attribute__((visibility("default")))
#else
#define KILN_API
#endif

/* The kinds of error; the Python runtime's exceptions have the same meaning. */
typedef enum {
  KILN_OK = 0,
  KILN_CONTRACT,    /* a call breaks the op's contract: operands, shapes, types, strides, aliasing, ranges, indices */
  KILN_INTEGRITY,   /* a tree's bytes are not what its manifests say: nothing of the file was used */
  KILN_SCHEMA,      /* a document is not strict JSON, or not of a schema this version reads */
  KILN_TARGET,      /* the tree holds nothing legal for this device, driver or CPU */
  KILN_SELECTION,   /* no candidate may run this call; the message lists each with its reason */
  KILN_UNAVAILABLE, /* something needed is not there: a tree, a driver; or the library was sealed, closed or forked */
  KILN_DRIVER,      /* the CUDA driver refused; kiln_error.driver holds its CUresult */
  KILN_MEMORY,      /* the system has no memory left */
  KILN_DECLINED,    /* a provider of the caller's declines this call: the next candidate is tried */
  KILN_INTERNAL     /* an entry or a provider broke its own promise */
} kiln_code;

typedef struct {
  kiln_code code;
  int driver;         /* CUresult of KILN_DRIVER, else 0 */
  char message[2048]; /* what was found, what was expected, what to do; cut with an ellipsis if longer */
} kiln_error;

/* Element types; the values never change. KILN_F8E4M3 and KILN_F8E5M2 are bytes to operands of type u8. */
typedef enum {
  KILN_F64 = 1, KILN_F32, KILN_F16, KILN_BF16, KILN_F8E4M3, KILN_F8E5M2, KILN_U8, KILN_I8, KILN_I16, KILN_I32, KILN_U32, KILN_I64,
  KILN_BOOL
} kiln_dtype;

#define KILN_MAX_RANK 8
#define KILN_CPU (-1)

/* An array of the caller's. */
typedef struct {
  void *data;
  kiln_dtype dtype;
  int32_t device;                 /* KILN_CPU or a CUDA ordinal */
  int32_t rank;                   /* 0 .. KILN_MAX_RANK */
  int32_t readonly;               /* not 0: writing it is refused */
  int64_t shape[KILN_MAX_RANK];
  int64_t strides[KILN_MAX_RANK]; /* in elements */
} kiln_tensor;

typedef enum {
  KILN_KIND_TENSOR = 1, KILN_KIND_NUMBER, KILN_KIND_INTEGER, KILN_KIND_BOOL, KILN_KIND_TEXT,
  KILN_KIND_WRITTEN /* where an in/out operand is written, if that is not in place */
} kiln_kind;

/* One named argument of a call: a tensor operand, a scalar, or an attribute. */
typedef struct {
  const char *name;
  kiln_kind kind;
  const kiln_tensor *tensor; /* NULL: an optional operand that is absent */
  double number;
  int64_t integer; /* also of KILN_KIND_BOOL */
  const char *text;
} kiln_argument;

typedef struct kiln_library kiln_library;
typedef struct kiln_op kiln_op;     /* belongs to its library */
typedef struct kiln_call kiln_call; /* one checked call, ready to run again and again */
typedef void *kiln_stream;          /* a CUstream, or NULL for the default stream; NULL on the CPU */

/* ---- arguments ---- */

static inline kiln_argument kiln_argument_of(const char *name, kiln_kind kind) {
  kiln_argument argument = {NULL, KILN_KIND_TENSOR, NULL, 0, 0, NULL};
  argument.name = name;
  argument.kind = kind;
  return argument;
}
static inline kiln_argument kiln_argument_tensor(const char *name, kiln_kind kind, const kiln_tensor *tensor) {
  kiln_argument argument = kiln_argument_of(name, kind);
  argument.tensor = tensor;
  return argument;
}
static inline kiln_argument kiln_argument_number(const char *name, double number) {
  kiln_argument argument = kiln_argument_of(name, KILN_KIND_NUMBER);
  argument.number = number;
  return argument;
}
static inline kiln_argument kiln_argument_integer(const char *name, kiln_kind kind, int64_t integer) {
  kiln_argument argument = kiln_argument_of(name, kind);
  argument.integer = integer;
  return argument;
}
static inline kiln_argument kiln_argument_text(const char *name, const char *text) {
  kiln_argument argument = kiln_argument_of(name, KILN_KIND_TEXT);
  argument.text = text;
  return argument;
}

/* `tensor` is a const kiln_tensor *. An integer is taken where a number is wanted, never the other way round. */
#define KILN_TENSOR(name, tensor) kiln_argument_tensor(name, KILN_KIND_TENSOR, tensor)
#define KILN_WRITTEN(name, tensor) kiln_argument_tensor(name, KILN_KIND_WRITTEN, tensor)
#define KILN_NUMBER(name, value) kiln_argument_number(name, value)
#define KILN_INTEGER(name, value) kiln_argument_integer(name, KILN_KIND_INTEGER, value)
#define KILN_BOOL(name, value) kiln_argument_integer(name, KILN_KIND_BOOL, (value) ? 1 : 0)
#define KILN_TEXT(name, value) kiln_argument_text(name, value)

/* A dense row-major tensor of the CPU or of CUDA device `device`; at most KILN_MAX_RANK extents. */
KILN_API kiln_tensor kiln_dense(void *data, kiln_dtype dtype, int32_t device, int32_t rank, const int64_t *shape);

/* ---- libraries ---- */

/* An Ed25519 verifier of the caller's, such as its vetted crypto library's: 1 if `signature` is that of the message by the holder of
 * the key, anything else refuses the tree. Any thread that opens or verifies a tree may call it. */
typedef int kiln_ed25519_fn(void *user, const uint8_t *message, size_t bytes, const uint8_t signature[64],
                            const uint8_t public_key[32]);

/* A tree and what it must be. */
typedef struct {
  const char *path;           /* the folder of a built tree, or NULL for `archive` */
  const void *archive;        /* a ustar archive of one in memory; it must outlive the library */
  size_t archive_bytes;
  const char *expect;         /* "sha256:<hex>", the digest of INDEX.json that `kiln build` printed; NULL: any */
  const uint8_t *public_key;  /* 32 bytes: INDEX.json.sig must be this Ed25519 key's signature of INDEX.json; NULL: not checked */
  int64_t minimum_generation; /* an older tree is refused: it was rolled back */
  kiln_ed25519_fn *ed25519;   /* asked in place of the built-in verifier; NULL: that one */
  void *ed25519_user;
} kiln_root;

typedef struct {
  const char *root;             /* the folder of a built tree; or give `roots` */
  const kiln_root *roots;       /* trees, searched in order after `root`: an op is the first tree's that holds it for the device */
  size_t root_count;
  const char *device;           /* "cpu" (NULL too), "cuda", "cuda:N", or a target such as "sm_90a", to explain calls without it */
  const char *expect;           /* of `root`, as in kiln_root */
  const uint8_t *public_key;    /* of `root` */
  int64_t minimum_generation;   /* of `root` */
  int32_t threads;              /* most CPU threads a call may use; 0: every processor this process may run on */
  const char *disable;          /* comma-separated ops, variants, op.variant, tiers, ISA tiers, providers that must not run;
                                   NULL: what the environment's KILN_DISABLE lists */
  const char *driver_path;      /* libcuda.so.1 by default */
  int32_t poison_scratch;       /* not 0: scratch is filled with 0xff before each use (not while a stream is captured) */
  int32_t scratch_per_call;     /* not 0: no pool; scratch is allocated and freed at each call, in stream order */
  kiln_ed25519_fn *ed25519;     /* of `root` */
  void *ed25519_user;
} kiln_options;

/* The version of the library that is running: KILN_VERSION of its own build. */
KILN_API const char *kiln_version(void);
/* Opens trees for a device: indices and manifests are verified now, each artifact when it is first used. */
KILN_API kiln_code kiln_open(const kiln_options *options, kiln_library **library, kiln_error *error);
/* Gives everything back; NULL is fine. No call may be running. Bound calls stay valid to free, and refuse to launch. */
KILN_API void kiln_close(kiln_library *library);
/* Checks a whole tree: integrity, missing and extra files, launch proofs. `seen` gets each fault, `*faults` their number. */
typedef void kiln_fault_fn(void *user, const char *file, const char *why);
KILN_API kiln_code kiln_verify(const kiln_root *root, kiln_fault_fn *seen, void *user, uint32_t *faults, kiln_error *error);

/* Ids are positions in the sorted list of op names: stable for the same trees and device. */
KILN_API uint32_t kiln_op_count(const kiln_library *library);
KILN_API const kiln_op *kiln_op_at(const kiln_library *library, uint32_t id); /* NULL: no such id */
KILN_API const char *kiln_op_name(const kiln_op *op);
/* How it is called, with a zero behind it, such as "rms_norm(in x, in? weight, f32 eps, out out; gemma)": the operands in declared
 * order, `?` for an optional one, then the names of attributes. `*needed`, if not NULL, is its whole size; what does not fit is cut. */
KILN_API kiln_code kiln_op_signature(const kiln_op *op, char *text, size_t size, size_t *needed, kiln_error *error);
/* The op of this name; NULL and KILN_CONTRACT with the nearest name if there is none. */
KILN_API const kiln_op *kiln_find(const kiln_library *library, const char *name, kiln_error *error);

/* ---- calls ---- */

/* What a caller asks for beyond the operands; zeros ask for nothing. */
typedef struct {
  const char *mode;    /* "exact" (NULL too), or "fast" to let kernels with an envelope contract go first */
  const char *tier;    /* only candidates of this tier, */
  const char *variant; /* of this name, */
  const char *isa;     /* and kernels of this CPU tier */
} kiln_choice;

typedef struct {
  const char *name;   /* of the operand */
  kiln_tensor tensor; /* dense, of the shape, element type and device that the call needs; no data */
} kiln_output;

/* The outputs that these arguments leave out: what to allocate before kiln_run. `*found` counts them all, of which the first `most`
 * are written. */
KILN_API kiln_code kiln_outputs(const kiln_op *op, const kiln_argument *arguments, size_t count, kiln_output *outputs, size_t most,
                                size_t *found, kiln_error *error);
/* Checks, selects and launches (CUDA) or runs (CPU). Every output must be given. The first call of a shape decides, later ones
 * find the decision. Zero rows or an empty grid: nothing is launched, and that is fine, unless an output would have elements all the
 * same. On the CPU, rows other than one with a bad index may have been written when KILN_CONTRACT tells of it. */
KILN_API kiln_code kiln_run(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice,
                            kiln_stream stream, kiln_error *error);
/* Which candidates there are, in order, and why each is passed over, as text with a final newline and zero; `*needed`, if not
 * NULL, is its whole size. Nothing is loaded or launched; outputs may be left out. */
KILN_API kiln_code kiln_explain(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice,
                                char *text,
                                size_t size, size_t *needed, kiln_error *error);

/* Everything of kiln_run but the launch: checked once, loaded, laid out. The arrays must live as long as the call is launched. On
 * CUDA it belongs to the context that is current (the device's primary one if none is). */
KILN_API kiln_code kiln_bind(const kiln_op *op, const kiln_argument *arguments, size_t count, const kiln_choice *choice,
                             kiln_call **call,
                             kiln_error *error);
/* Runs it again: nothing is checked, looked up, allocated or locked. */
KILN_API kiln_code kiln_launch(kiln_call *call, kiln_stream stream, kiln_error *error);
/* Other addresses of the same shapes, strides and types, aligned as the variant needs, or other values of scalars on which the
 * choice does not depend. All or nothing; overlaps are checked after all are changed. */
KILN_API kiln_code kiln_rebind(kiln_call *call, const kiln_argument *changed, size_t count, kiln_error *error);
KILN_API const char *kiln_call_variant(const kiln_call *call); /* "" for a call without rows */
KILN_API size_t kiln_scratch_bytes(const kiln_call *call);     /* that a launch needs */
KILN_API size_t kiln_zeroed_bytes(const kiln_call *call);      /* the same of scratch that is all zeros between launches */
KILN_API void kiln_call_free(kiln_call *call);                 /* NULL is fine */

/* ---- production ---- */

/* Verifies and loads every kernel that this device may run of these ops (NULL: of all) and of what their plans call, in the current
 * context; `*loaded`, if not NULL, is their number. */
KILN_API kiln_code kiln_prepare(kiln_library *library, const char *const *names, size_t count, uint32_t *loaded, kiln_error *error);
/* From now on no call loads, allocates, locks, asks the device or reads a file: one that would need it is KILN_UNAVAILABLE and
 * names the op. New shapes are fine: 4 MiB are taken now to remember some. Exceptions: CPU threads are woken, and composite plans
 * on one stream from several threads take turns. */
KILN_API void kiln_seal(kiln_library *library);
/* Scratch of a stream: a buffer of the caller's on the device, or, where `buffer` is NULL, the library's own, grown to `bytes`
 * now. Never freed while a graph may use it: only kiln_close gives it back. CU_STREAM_PER_THREAD has none: calls that need scratch
 * take a stream of one's own. On the CPU `stream` is NULL, `buffer` must be NULL, and one block is added for one more call at a
 * time. */
KILN_API kiln_code kiln_set_scratch(kiln_library *library, kiln_stream stream, void *buffer, size_t bytes, kiln_error *error);
/* The same for scratch that kernels find all zeros and leave so, the largest kiln_zeroed_bytes of it: the library's own is filled
 * with zeros when it is allocated. The caller fills a buffer of its own with zeros once, before the first launch; nothing but
 * launches on this stream may write it. */
KILN_API kiln_code kiln_set_zeroed_scratch(kiln_library *library, kiln_stream stream, void *buffer, size_t bytes, kiln_error *error);
/* Waits for a stream of the current context and gives back its scratch of both kinds: before it is destroyed, and after a kernel
 * was aborted, which may leave zeroed scratch dirty. No graph may use it any more; buffers of the caller's are the caller's again.
 * The next call gets new memory, or, of a sealed library, what is set for it. On the CPU `stream` is NULL, and calls are waited for. */
KILN_API kiln_code kiln_release_scratch(kiln_library *library, kiln_stream stream, kiln_error *error);
/* The library's own scratch: blocks and bytes that it holds, calls that found what they needed, blocks allocated, poison fills. */
typedef struct { uint64_t blocks, bytes, hits, growths, fills; } kiln_scratch_counters;
KILN_API void kiln_scratch_stats(const kiln_library *library, int32_t zeroed, kiln_scratch_counters *out); /* zeroed: which kind */
/* Forbids (or allows again) a name as KILN_DISABLE would. Bound calls and captured graphs keep what they have. */
KILN_API kiln_code kiln_disable(kiln_library *library, const char *name, int32_t disabled, kiln_error *error);
/* Runs per op and variant (or provider), those of plans' steps included, and calls that a provider declined; in order, zeros left
 * out. */
typedef void kiln_stats_fn(void *user, const char *op, const char *name, uint64_t runs, uint64_t declined);
KILN_API void kiln_stats(const kiln_library *library, kiln_stats_fn *seen, void *user);

/* What a provider may ask of the device. */
typedef struct {
  int32_t ordinal;        /* KILN_CPU or the CUDA ordinal */
  int32_t major, minor;   /* compute capability; 0 on the CPU */
  int32_t units;          /* multiprocessors, or CPU threads */
  int32_t unified_memory; /* not 0: the CPU may use the device's pointers */
} kiln_device;

/* A function of the caller's that serves an op: its calls, bound ones too, but not the steps of other ops' plans, which stay the
 * tree's (the Python runtime asks providers for those as well). Candidates are tried by priority, highest first, ties by name; the
 * tree itself is the provider "kiln" of priority 0. */
typedef struct {
  const char *name;
  int32_t priority;
  int32_t reference; /* not 0: it runs on the CPU whatever the device, which must have unified memory; priority must be -1000 */
  /* Whether it serves this device: 1, 0, or less for an error, which refuses the registration. NULL: always. Asked once. */
  int (*supports)(void *user, const kiln_device *device);
  /* Runs one call whose operands were checked; every scalar and attribute is among the arguments. KILN_DECLINED: before anything
   * was written, the next candidate is tried. Any thread may call it, several at once. */
  kiln_code (*run)(void *user, const kiln_op *op, const kiln_argument *arguments, size_t count, kiln_stream stream,
                   kiln_error *error);
  void *user;
} kiln_provider;
/* Refused: no name or function, a name of this op's providers, "kiln", a sealed library. */
KILN_API kiln_code kiln_register_provider(kiln_library *library, const char *op, const kiln_provider *provider, kiln_error *error);

/* Runs the seeded vector of each kernel that this device may run. What it proves per kernel, on this machine: it loads, it runs
 * twice with the same bits, its floating-point outputs are finite, and they equal those of every other candidate of the op that
 * takes the same call (to the bit, or within the envelope of the looser contract). A kernel without a second candidate is only
 * shown to run; an op that is only half of another one (a step of its primitive plan) is left to that one. It does not compare
 * with an oracle: `kiln test` does. `seen` is called for each kernel and comparison; `why` is NULL for a pass, `against` where the
 * kernel ran alone. */
typedef void kiln_selftest_fn(void *user, const char *op, const char *variant, const char *against, const char *why);
KILN_API kiln_code kiln_selftest(kiln_library *library, kiln_selftest_fn *seen, void *user, uint32_t *failures, kiln_error *error);

#ifdef __cplusplus
}
#endif

#endif
