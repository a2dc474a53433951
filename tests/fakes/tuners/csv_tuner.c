/* Somebody else's tuner, for `dynamiccl-deploy table --plugin`: v4 alone, rules from a CSV file.
 *
 * CSV_TUNER_RULES names the file; a line is `collective,min bytes,max bytes,algorithm,protocol,
 * channels`, all numbers; the first that matches counts. As NVIDIA's example does, it sets one
 * channel before it looks, and logs each call with arguments of several types.
 * CSV_TUNER_FAULT=crash, init or ask makes it misbehave.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Logger)(int level, unsigned long flags, const char* file, int line,
                       const char* format, ...);

typedef struct {
  int collective;
  unsigned long first, last;
  int algorithm, protocol, channels;
} Rule;

typedef struct {
  Logger log;
  int num_rules;
  Rule rules[64];
} Tuner;

static int has_fault(const char* name) {
  const char* fault = getenv("CSV_TUNER_FAULT");
  return fault != NULL && strcmp(fault, name) == 0;
}

static int init(size_t ranks, size_t nodes, Logger log, void** context) {
  printf("noise on standard output\n");
  if (has_fault("init")) return 3;
  Tuner* tuner = calloc(1, sizeof *tuner);
  tuner->log = log;
  const char* path = getenv("CSV_TUNER_RULES");
  FILE* file = path != NULL ? fopen(path, "r") : NULL;
  if (file != NULL) {
    Rule* rule = tuner->rules;
    while (tuner->num_rules < 64 &&
           fscanf(file, "%d,%lu,%lu,%d,%d,%d\n", &rule->collective, &rule->first, &rule->last,
                  &rule->algorithm, &rule->protocol, &rule->channels) == 6) {
      ++rule;
      ++tuner->num_rules;
    }
    fclose(file);
  }
  log(3, 0x40, __FILE__, __LINE__, "%zu ranks, %zu nodes, %d rules", ranks, nodes,
      tuner->num_rules);
  *context = tuner;
  return 0;
}

static int ask(void* context, int collective, size_t bytes, int pipe_ops, float** costs,
               int num_algorithms, int num_protocols, int registered, int* channels) {
  Tuner* tuner = context;
  float* cells = (float*)costs;
  (void)pipe_ops;
  (void)registered;
  if (has_fault("crash")) *(volatile int*)8 = 1;
  if (has_fault("ask")) return 2;
  *channels = 1;
  for (int i = 0; i < tuner->num_rules; ++i) {
    const Rule* rule = &tuner->rules[i];
    if (rule->collective != collective || bytes < rule->first || bytes > rule->last) continue;
    if (rule->algorithm >= num_algorithms) continue;
    float* cell = &cells[rule->algorithm * num_protocols + rule->protocol];
    if (*cell == -1.0F) continue;
    *cell = 0.0F;
    *channels = rule->channels;
    return 0;
  }
  tuner->log(3, 0x40, __FILE__, __LINE__, "no rule for %d: %f", collective, 1.5);
  return 0;
}

static int destroy(void* context) {
  free(context);
  return 0;
}

const struct {
  const char* name;
  int (*init)(size_t, size_t, Logger, void**);
  int (*ask)(void*, int, size_t, int, float**, int, int, int, int*);
  int (*destroy)(void*);
} ncclTunerPlugin_v4 = {"CSV", init, ask, destroy};
