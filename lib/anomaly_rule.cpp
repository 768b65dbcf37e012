#include "lib/anomaly_rule.h"

namespace forkpoint {
namespace {

bool is_named(const std::string& tensor, std::string_view name) {
  return tensor == name || (tensor.ends_with(name) && tensor[tensor.size() - name.size() - 1] == '.');
}

}  // namespace

bool is_float(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128:
      return true;
    default:
      return false;
  }
}

ValueRole value_role(const Site& site) {
  ValueRole role;
  role.number = site.kind == Kind::scalar;
  role.loss = site.role == Role::loss;
  role.looked_at = site.role != Role::rng && site.role != Role::sampler && site.kind != Kind::state;
  role.magnitude =
      role.looked_at && site.phase != Phase::load && site.role != Role::scalar && (!role.number || role.loss);
  const bool collective = site.kind == Kind::collective;
  role.collective_input = collective && site.role == Role::input,
  role.collective_output = collective && site.role == Role::output;
  role.sink = role.loss || site.role == Role::gradient || site.role == Role::parameter ||
              site.role == Role::optimizer_state || site.phase == Phase::backward || collective;
  role.gradient_side =
      site.phase == Phase::backward || collective || site.role == Role::gradient || site.role == Role::scalar;
  role.bursts = site.phase == Phase::backward || site.phase == Phase::collective || site.role == Role::gradient ||
                site.role == Role::optimizer_state;
  // found_inf: of a fused optimizer, which is called all the same and skips by itself.
  role.skipped = site.role == Role::scalar && (is_named(site.tensor, "skipped") || is_named(site.tensor, "found_inf"));
  role.mask = site.tensor.find("mask") != std::string::npos;
  role.op = op_key(site);
  return role;
}

bool scaler_explains(const ValueRole& role, DType dtype) {
  return role.gradient_side || (role.loss && dtype == DType::f16);
}

}  // namespace forkpoint
