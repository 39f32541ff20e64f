// Prompt attention from C99: the case `tiny` on the CPU, or on GPU 0 with the argument "cuda" or "hip". Exit status 0: every digest is right.
#include <stdio.h>
#include <string.h>
#include <strata_pa.h>

#include "golden.h"

static int complain(const char* what) {
  fprintf(stderr, "%s: %s\n", what, strata_pa_last_error());
  return 1;
}

static strata_pa_context* device;

// A copy in the device's memory.
static void* place(const void* host, size_t bytes) {
  void* memory = NULL;
  if (strata_pa_allocate(device, bytes, &memory) || strata_pa_upload(device, memory, host, bytes)) complain("memory");
  return memory;
}

static int run(const strata_pa_problem* p, const char* kernel, float* answer, size_t bytes) {
  strata_pa_plan* plan;
  if (strata_pa_plan_create(device, p, kernel, &plan)) return complain("plan");
  char digest[65] = "";
  int failed = strata_pa_run(plan, p, NULL, NULL, 0) || strata_pa_synchronize(device, NULL) || strata_pa_download(device, answer, p->out, bytes);
  if (failed) complain("run");
  golden_sha256(answer, bytes, digest);
  failed = failed || strcmp(digest, golden_tiny(kernel)) != 0;
  printf("%-6s %s %s\n", strata_pa_plan_kernel(plan), digest, failed ? "WRONG" : "ok");
  strata_pa_plan_destroy(plan);
  return failed;
}

int main(int argc, char** argv) {
  strata_pa_context_options options = {sizeof options, STRATA_PA_CPU, 0, 0, NULL};
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) options.device = STRATA_PA_CUDA;
  if (argc > 1 && strcmp(argv[1], "hip") == 0) options.device = STRATA_PA_HIP;
  if (strata_pa_context_create(&options, &device)) return complain("device");
  printf("strata_pa %s on %s\n", strata_pa_version(), strata_pa_context_text(device));

  golden g;
  if (!golden_make(&g, 96, 8, 4, 1)) return 1;
  const size_t codes = (size_t)(g.pages * GOLDEN_KV_HEADS * g.page_size) * GOLDEN_DIM, scales = codes / GOLDEN_GROUP * sizeof *g.k_scale;
  const size_t bytes = (size_t)g.n_q * GOLDEN_HEADS * GOLDEN_DIM * sizeof *g.q;
  int32_t kv_len = (int32_t)g.context;

  strata_pa_problem p;
  strata_pa_problem_init(&p, sizeof p);
  p.n_q = g.n_q, p.n_head = GOLDEN_HEADS, p.head_dim = GOLDEN_DIM;
  p.pages = p.max_pages = g.pages, p.n_kv = GOLDEN_KV_HEADS, p.page_size = g.page_size, p.group = GOLDEN_GROUP;
  p.cap = g.cap, p.kv_len = &kv_len;
  if (strata_pa_problem_set_strides(&p, STRATA_PA_HND)) return complain("strides");
  void* memory[] = {
      place(g.q, bytes),
      place(g.k, codes),
      place(g.v, codes),
      place(g.k_scale, scales),
      place(g.v_scale, scales),
      place(g.page_table, (size_t)g.pages * sizeof *g.page_table),
      place(g.ids, (size_t)(g.n_q * g.cap) * sizeof *g.ids),
      place(g.widths, (size_t)g.n_q * sizeof *g.widths),
      place(g.q, bytes),
  };
  p.q = memory[0], p.k = memory[1], p.v = memory[2], p.k_scale = memory[3], p.v_scale = memory[4];
  p.page_table = memory[5], p.ids = memory[6], p.widths = memory[7], p.out = memory[8];

  int wrong = 0;
  const char* const kernels[] = {"fp32", "imma", "exact"};
  for (int i = 0; i < 3; ++i) wrong += run(&p, kernels[i], g.q, bytes);

  for (size_t i = 0; i < sizeof memory / sizeof *memory; ++i) strata_pa_release(device, memory[i]);
  strata_pa_context_destroy(device);
  golden_free(&g);
  return wrong != 0;
}
