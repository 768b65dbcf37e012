/* forkpoint.h: tell the forkpoint probe what a C or C++ trainer is doing. Header-only; needs nothing at link time but
 * libdl (in libc since glibc 2.34). Without the probe in the process every call is a no-op that costs a load and a branch;
 * while it sleeps, too, but for the begin and end of a step, the rank and the facts: `forkpoint attach` wakes the probe of a
 * running job at a step's number, so it keeps count.
 *
 *   forkpoint_step_begin(step);                                    // or forkpoint::Step scope(step);
 *   { forkpoint::Layer scope(FORKPOINT_FORWARD, "blocks.0.mlp.fc1");
 *     forkpoint::tensor("input", FORKPOINT_ROLE_INPUT, x, {B * T, C});  ... }
 *   forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, loss);
 *   forkpoint_step_end();
 *
 * Threads: any thread may call. The step and micro-step belong to the process (one rank); scopes belong to the calling
 * thread. Names are copied. Data on the host is read before the call returns; data on a CUDA device is read by a kernel
 * that is enqueued on the given stream, so later work on that stream may overwrite it. No call fails, blocks on the
 * device or changes any state of the caller's; what cannot be recorded becomes a Gap in the run. */
#ifndef FORKPOINT_H_
#define FORKPOINT_H_

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* RTLD_DEFAULT */
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FORKPOINT_API_VERSION 1

enum forkpoint_phase {
  FORKPOINT_LOAD = 0, FORKPOINT_DATA = 1, FORKPOINT_FORWARD = 2, FORKPOINT_BACKWARD = 3, FORKPOINT_COLLECTIVE = 4,
  FORKPOINT_OPTIMIZER = 5, FORKPOINT_STATE = 6
};

enum forkpoint_dtype {
  FORKPOINT_U8 = 0, FORKPOINT_I8 = 1, FORKPOINT_U16 = 2, FORKPOINT_I16 = 3, FORKPOINT_U32 = 4, FORKPOINT_I32 = 5,
  FORKPOINT_U64 = 6, FORKPOINT_I64 = 7, FORKPOINT_BOOL = 8, FORKPOINT_F16 = 9, FORKPOINT_BF16 = 10, FORKPOINT_F32 = 11,
  FORKPOINT_F64 = 12, FORKPOINT_F8E4M3 = 13, FORKPOINT_F8E5M2 = 14, FORKPOINT_F4X2 = 15, FORKPOINT_C64 = 16,
  FORKPOINT_C128 = 17, FORKPOINT_RAW = 18
};

/* INPUT and OUTPUT of a layer are recorded from level "layer" on, those of a collective always, everything else always. */
enum forkpoint_role {
  FORKPOINT_ROLE_INPUT = 0, FORKPOINT_ROLE_OUTPUT = 1, FORKPOINT_ROLE_PARAMETER = 2, FORKPOINT_ROLE_GRADIENT = 3,
  FORKPOINT_ROLE_OPTIMIZER_STATE = 4, FORKPOINT_ROLE_BATCH = 5, FORKPOINT_ROLE_LOSS = 6, FORKPOINT_ROLE_SCALAR = 7,
  FORKPOINT_ROLE_RNG = 8, FORKPOINT_ROLE_SAMPLER = 9, FORKPOINT_ROLE_OTHER = 10
};

enum forkpoint_device { FORKPOINT_HOST = 0, FORKPOINT_CUDA = 1 };

typedef struct forkpoint_tensor_desc {
  uint32_t struct_size;          /* sizeof(forkpoint_tensor_desc) */
  const char* name;              /* "input", "grad_output", "weight.grad", ... */
  const void* data;              /* address of element (0, 0, ...); may be NULL when a dimension is 0 */
  int32_t dtype;                 /* enum forkpoint_dtype */
  int32_t role;                  /* enum forkpoint_role */
  int32_t device;                /* enum forkpoint_device */
  int32_t ndim;                  /* 0 .. 16; 0 is a scalar tensor of one element */
  const int64_t* shape;          /* ndim elements */
  const int64_t* strides;        /* ndim, in elements; NULL: contiguous, row-major */
  const int64_t* global_shape;   /* ndim, of the tensor that this one is a shard of; NULL: not a shard */
  const int64_t* global_offset;  /* ndim; NULL exactly when global_shape is */
  void* stream;                  /* CUDA stream that orders the data (cudaStream_t or CUstream); ignored on the host */
} forkpoint_tensor_desc;

/* The probe's table of entry points. Fields are only ever appended. */
typedef struct forkpoint_api {
  uint32_t version;
  volatile int32_t active; /* 0: dormant, nothing is recorded */
  volatile int32_t level;  /* 0 step, 1 layer, 2 launch; meaningful while active */
  void (*rank)(int32_t rank, int32_t world_size);
  void (*step_begin)(int64_t step);
  void (*step_end)(void);
  void (*micro_step)(int32_t index);
  void (*scope_begin)(int32_t phase, const char* layer, const char* op);
  void (*collective_begin)(const char* op, const char* communicator, const int32_t* members, int32_t member_count,
                           const char* layer);
  void (*scope_end)(void);
  void (*tensor)(const forkpoint_tensor_desc* desc);
  void (*scalar)(const char* name, int32_t role, double value);
  void (*state)(const char* name, int32_t role, const void* data, size_t size_bytes);
  void (*fact)(const char* name, const char* value);
} forkpoint_api;

typedef const forkpoint_api* (*forkpoint_get_api_function)(uint32_t version);

#ifndef FORKPOINT_PROBE_ITSELF /* the probe wants the types only */

/* One table a translation unit that never changes once it is set; resolved when the program is loaded. */
static forkpoint_api forkpoint_absent_; /* all zero, never written */
static const forkpoint_api* forkpoint_table_ = &forkpoint_absent_;

__attribute__((constructor, unused)) static void forkpoint_resolve_(void) {
  union { void* object; forkpoint_get_api_function function; } symbol; /* ISO C has no cast between these */
  const forkpoint_api* table;
  symbol.object = dlsym(RTLD_DEFAULT, "forkpoint_get_api");
  table = symbol.object ? symbol.function(FORKPOINT_API_VERSION) : NULL;
  if (table) forkpoint_table_ = table;
}

/* 1 while a probe records. level: the finest level that is recorded. Use them to skip work that only serves recording. */
static inline int forkpoint_active(void) { return __builtin_expect(forkpoint_table_->active != 0, 0); }
static inline int forkpoint_level(void) { return forkpoint_table_->level; }

/* Which rank this process is. Needed only where RANK and WORLD_SIZE (or OMPI_COMM_WORLD_*, SLURM_*, PMI_*) do not say;
 * call it before the first record. */
static inline void forkpoint_rank(int32_t rank, int32_t world_size) {
  if (forkpoint_table_->rank) forkpoint_table_->rank(rank, world_size);
}

/* A step is global and 0-based, from data load to the end of its optimizer update. Beginning one ends the one before.
 * Before the first step, records in phase load (which is the phase where no scope gives one) are what the run starts from
 * (initial weights, a checkpoint). All others made before a step begins belong to that step; those after the last step's end are not kept. */
static inline void forkpoint_step_begin(int64_t step) {
  if (forkpoint_table_->step_begin) forkpoint_table_->step_begin(step);
}
static inline void forkpoint_step_end(void) {
  if (forkpoint_table_->step_end) forkpoint_table_->step_end();
}
/* Gradient accumulation: index counts from 0 within the step; step_begin sets it back to 0. */
static inline void forkpoint_micro_step(int32_t index) {
  if (forkpoint_active()) forkpoint_table_->micro_step(index);
}

/* Scopes nest; NULL (or a phase below 0) inherits from the enclosing one. layer is the full dotted path. Outside of any
 * scope the role gives the phase: a batch is data, a gradient backward, a parameter optimizer, and so on. */
static inline void forkpoint_scope_begin(int32_t phase, const char* layer, const char* op) {
  if (forkpoint_active()) forkpoint_table_->scope_begin(phase, layer, op);
}
/* A collective of `members` (world ranks): the tensors inside are its input and output. communicator is a name that means
 * the same in every run ("world", "tp"). layer: what the data belongs to, or NULL to inherit. */
static inline void forkpoint_collective_begin(const char* op, const char* communicator, const int32_t* members,
                                              int32_t member_count, const char* layer) {
  if (forkpoint_active()) forkpoint_table_->collective_begin(op, communicator, members, member_count, layer);
}
static inline void forkpoint_scope_end(void) {
  if (forkpoint_active()) forkpoint_table_->scope_end();
}

static inline void forkpoint_tensor(const forkpoint_tensor_desc* desc) {
  if (forkpoint_active()) forkpoint_table_->tensor(desc);
}
/* A number that enters the computation or comes out of it: loss, learning rate, loss scale. Compared bit by bit. */
static inline void forkpoint_scalar(const char* name, int32_t role, double value) {
  if (forkpoint_active()) forkpoint_table_->scalar(name, role, value);
}
/* Opaque host state: a generator's, a sampler's. */
static inline void forkpoint_state(const char* name, int32_t role, const void* data, size_t size_bytes) {
  if (forkpoint_active()) forkpoint_table_->state(name, role, data, size_bytes);
}
/* A fact for the run's manifest: a version, a parallel coordinate ("tp_rank"). */
static inline void forkpoint_fact(const char* name, const char* value) {
  if (forkpoint_table_->fact) forkpoint_table_->fact(name, value);
}

#endif /* FORKPOINT_PROBE_ITSELF */

#ifdef __cplusplus
}  /* extern "C" */
#endif

#if defined(__cplusplus) && !defined(FORKPOINT_PROBE_ITSELF)
#include <initializer_list>

namespace forkpoint {

class Step {
 public:
  explicit Step(int64_t step) { forkpoint_step_begin(step); }
  ~Step() { forkpoint_step_end(); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
};

/* REQUIRES of every scope: it ends on the thread on which it began. */
class Scope {
 public:
  Scope(int phase, const char* layer, const char* op = nullptr) { forkpoint_scope_begin(phase, layer, op); }
  ~Scope() { forkpoint_scope_end(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};
using Layer = Scope;

class Collective {
 public:
  Collective(const char* op, const char* communicator, const int32_t* members, int member_count,
             const char* layer = nullptr) {
    forkpoint_collective_begin(op, communicator, members, member_count, layer);
  }
  ~Collective() { forkpoint_scope_end(); }
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
};

template <typename T> struct DtypeOf;
template <> struct DtypeOf<float> { static constexpr int value = FORKPOINT_F32; };
template <> struct DtypeOf<double> { static constexpr int value = FORKPOINT_F64; };
template <> struct DtypeOf<bool> { static constexpr int value = FORKPOINT_BOOL; };
template <> struct DtypeOf<int8_t> { static constexpr int value = FORKPOINT_I8; };
template <> struct DtypeOf<uint8_t> { static constexpr int value = FORKPOINT_U8; };
template <> struct DtypeOf<int16_t> { static constexpr int value = FORKPOINT_I16; };
template <> struct DtypeOf<uint16_t> { static constexpr int value = FORKPOINT_U16; };
template <> struct DtypeOf<int32_t> { static constexpr int value = FORKPOINT_I32; };
template <> struct DtypeOf<uint32_t> { static constexpr int value = FORKPOINT_U32; };
template <> struct DtypeOf<int64_t> { static constexpr int value = FORKPOINT_I64; };
template <> struct DtypeOf<uint64_t> { static constexpr int value = FORKPOINT_U64; };

/* A contiguous tensor. device: FORKPOINT_HOST or FORKPOINT_CUDA. */
template <typename T>
inline void tensor(const char* name, int role, const T* data, std::initializer_list<int64_t> shape,
                   int device = FORKPOINT_HOST, void* stream = nullptr) {
  if (!forkpoint_active()) return;
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = name;
  desc.data = data;
  desc.dtype = DtypeOf<T>::value;
  desc.role = role;
  desc.device = device;
  desc.ndim = static_cast<int32_t>(shape.size());
  desc.shape = shape.begin();
  desc.stream = stream;
  forkpoint_table_->tensor(&desc);
}

}  /* namespace forkpoint */
#endif

#endif  /* FORKPOINT_H_ */
