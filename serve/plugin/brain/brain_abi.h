/* The seam between the plugin and a leader's brain: from live history to the next decision table.
 *
 * A brain runs on the leader of a communicator alone, off the hot path, and only ever proposes:
 * what it writes is decoded and checked like any table file, and takes effect only when all ranks
 * agree. An error, or bytes that are no table, leave the table in force. Plain C, so that it holds
 * between libraries built with different compilers and C++ runtimes.
 */
#ifndef DYNAMICCL_BRAIN_ABI_H
#define DYNAMICCL_BRAIN_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DYNAMICCL_BRAIN_VERSION 1
/* What a library that holds a brain exports: const dynamiccl_brain* dynamiccl_brain_v1(void). */
#define DYNAMICCL_BRAIN_SYMBOL "dynamiccl_brain_v1"

/* Calls of one task key that a brain sees (WINDOW_LENGTH of datasets/features.py). */
enum { DYNAMICCL_WINDOW = 8 };
/* Bytes that hold any decision table, and any reason. */
enum { DYNAMICCL_TABLE_BYTES = 10012, DYNAMICCL_REASON_BYTES = 256 };

/* One timed call. */
typedef struct {
  uint64_t size_bytes; /* NCCL's nBytes */
  double time_us;      /* minimum over ranks, more than 0 */
  double skew_us;      /* negative: unknown */
  double interference; /* negative: unknown */
  int8_t algorithm;    /* really used; -1: unknown */
  int8_t protocol;     /* really used; -1: unknown */
  int8_t num_channels; /* really used; 0: unknown */
} dynamiccl_call;

/* One task key with at least one timed call. A key that is not listed is decided as at the start of
 * a job, when nothing but the job is known. */
typedef struct {
  int32_t collective; /* ncclFunc_t, 0 .. 4 */
  int32_t bin;        /* size bin (dynamiccl/sizes.py) */
  int32_t num_calls;  /* 1 .. DYNAMICCL_WINDOW */
  uint32_t num_timed; /* calls so far, of which these are the last; 0: unknown */
  dynamiccl_call calls[DYNAMICCL_WINDOW]; /* the latest, oldest first, from calls[0] on */
} dynamiccl_task;

/* The communicator whose brain it is. */
typedef struct {
  const char* artifact; /* its directory */
  const char* system;   /* as plugin.index names it */
  const char* socket;   /* where a brain that is another process listens; null for any other */
  int32_t num_nodes;    /* NCCL's own nNodes */
  int32_t num_ranks;
} dynamiccl_brain_config;

typedef struct {
  const dynamiccl_task* tasks;
  int32_t num_tasks;
  const uint8_t* table; /* in force, a table file's bytes; null: NCCL's own choice everywhere */
  size_t table_bytes;
} dynamiccl_history;

/* A kind of brain. No function throws, and none is called from two threads at once with the same
 * `brain`. open and decide return 0, or else write a line without line break into `reason`. */
typedef struct {
  uint32_t version; /* DYNAMICCL_BRAIN_VERSION */
  const char* name; /* for people */
  /* Make a brain for one communicator; all that is slow about a first decision happens here. The
   * strings of `config` must outlive the call, not the brain. */
  int (*open)(const dynamiccl_brain_config* config, void** brain, char* reason,
              size_t reason_bytes);
  /* Write the whole table that should be in force next (serve/table.py) and its length, or set
   * `*table_bytes` to 0: keep the one in force. */
  int (*decide)(void* brain, const dynamiccl_history* history, uint8_t* table, size_t capacity,
                size_t* table_bytes, char* reason, size_t reason_bytes);
  void (*close)(void* brain);
} dynamiccl_brain;

#ifdef __cplusplus
}
#endif

#endif
