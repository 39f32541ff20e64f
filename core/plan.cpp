#include "core/plan.h"

#include "core/errors.h"
#include "core/gpu.h"

namespace strata_pa {
namespace {

struct Candidate {
  const Kernel* kernel;
  std::vector<std::string> reasons;
};

// One candidate for each kernel name: the device's own row, or any row of that name, which then says where the kernel exists.
std::vector<const Kernel*> rows_for(DeviceKind backend) {
  std::vector<const Kernel*> rows;
  for (const Kernel& k : kernel_table())
    if (k.backend == backend) rows.push_back(&k);
  for (const std::string& name : kernel_names()) {
    const Kernel* elsewhere = nullptr;
    for (const Kernel& k : kernel_table()) {
      if (k.name != name) continue;
      if (k.backend == backend) {
        elsewhere = nullptr;
        break;
      }
      if (!elsewhere) elsewhere = &k;
    }
    if (elsewhere) rows.push_back(elsewhere);
  }
  return rows;
}

std::string explain(const Candidate& c) {
  if (!c.reasons.empty()) return join(c.reasons, "; ");
  return c.kernel->opt_in ? text("can run when it is switched on (kernel='", c.kernel->name, "')") : "can run";
}

[[noreturn]] void refuse(const std::string& headline, const std::vector<Candidate>& candidates) {
  std::string message = headline;
  for (const Candidate& c : candidates) message += text("\n  ", c.kernel->name, ": ", explain(c));
  throw UnsupportedProblem(message);
}

}  // namespace

Plan make_plan(const Problem& problem, const Device& device, const std::optional<std::string>& kernel, const Environment& environment) {
  Wish wish = resolve_switches(kernel, environment);
  std::vector<Candidate> candidates;
  for (const Kernel* k : rows_for(device.id.kind)) candidates.push_back({k, not_supported_reasons(*k, problem, device)});

  Plan plan;
  plan.device = device;
  plan.notes = wish.notes;
  plan.chosen_by = wish.by;
  std::string where = device.describe();
  // Only the kernel that is about to be chosen asks the driver for its image.
  auto can_run = [&](Candidate& c) {
    if (c.reasons.empty() && c.kernel->prepare && problem.n_q > 0)
      if (std::string why = c.kernel->prepare(*c.kernel, problem, device); !why.empty()) c.reasons.push_back(why);
    return c.reasons.empty();
  };
  for (Candidate& c : candidates) {
    if (c.kernel->name != wish.kernel) continue;
    if (can_run(c))
      plan.kernel = c.kernel;
    else if (wish.must)
      refuse(text("kernel='", wish.kernel, "' cannot run this problem on ", where, ":"), candidates);
    else
      plan.notes.push_back(text(wish.by, " was not followed on ", where, ": ", wish.kernel, ": ", join(c.reasons, "; ")));
  }
  if (!plan.kernel) {
    plan.chosen_by = "default";
    for (Candidate& c : candidates) {
      if (plan.kernel || c.kernel->opt_in || !c.reasons.empty()) continue;
      if (can_run(c))
        plan.kernel = c.kernel;
      else  // the device's own order would have taken it
        plan.notes.push_back(text(c.kernel->name, " does not run on ", where, ": ", join(c.reasons, "; ")));
    }
  }
  if (!plan.kernel) refuse(text("no default kernel can run this problem on ", where, ":"), candidates);

  for (Candidate& c : candidates) {
    if (c.kernel == plan.kernel) continue;
    if (c.reasons.empty())
      c.reasons.push_back(c.kernel->opt_in ? "opt-in, and not switched on" : text(plan.kernel->name, " was chosen (", plan.chosen_by, ")"));
    plan.refused.push_back({c.kernel->name, c.reasons});
  }
  if (device.gpu && plan.kernel->image)
    if (std::string note = device.gpu->note(plan.kernel->image); !note.empty()) plan.notes.push_back(note);
  plan.workspace_bytes = plan.kernel->workspace(problem, device);
  return plan;
}

std::string describe(const Plan& plan) {
  std::string threads = plan.device.num_threads ? text(", ", plan.device.num_threads, " threads") : "";
  std::string lines = text("Plan: ", plan.kernel->name, " on ", plan.device.name(), " (", plan.device.architecture(), threads, "), chosen by ", plan.chosen_by,
                           ", workspace ", plan.workspace_bytes, " bytes");
  for (const Refusal& r : plan.refused) lines += text("\n  refused ", r.kernel, ": ", join(r.reasons, "; "));
  for (const std::string& note : plan.notes) lines += text("\n  note: ", note);
  return lines;
}

DeviceKernels kernels_of(const Device& device) {
  DeviceKernels list;
  for (const Kernel* k : rows_for(device.id.kind)) {
    std::vector<std::string> reasons = not_supported_reasons(*k, device);
    if (reasons.empty())
      list.kernels.push_back(k);
    else
      list.refused.push_back({k->name, reasons});
  }
  return list;
}

}  // namespace strata_pa
