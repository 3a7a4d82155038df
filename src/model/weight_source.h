// Where a model takes its weights from: a checkpoint directory or a generator of random ones. Names are in one internal
// form, whatever prefixes, fusion and formats the checkpoint uses:
//
//   embed_tokens, norm, lm_head
//   layers.N.input_layernorm, layers.N.post_attention_layernorm
//   layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj}, layers.N.self_attn.{q_norm,k_norm}
//   layers.N.linear_attn.{in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj}, .conv1d, .A_log, .dt_bias, .norm
//   layers.N.mlp.{gate_proj,up_proj,down_proj}                                  (dense)
//   layers.N.mlp.gate, .shared_expert_gate, .shared_expert.{gate,up,down}_proj, .experts.E.{gate,up,down}_proj
//   mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0.<as a trunk attention layer>
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "ops/tensor.h"

namespace fourfold::model {

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual const ModelConfig& config() const = 0;

  // The matrix of a module, in whatever format it is stored, checked to be [rows, columns]. A missing tensor, a wrong
  // shape, a missing or non-finite scale is an Error that names tensor, layer and expert.
  virtual ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) = 0;

  // A small parameter as fp32 (norm weights, convolution taps, A_log, dt_bias), checked to have `count` finite
  // elements.
  virtual std::vector<float> vector(std::string_view name, int64_t count) = 0;

  // The bytes of a matrix were copied and will not be read again.
  virtual void release(const ops::MatrixSource& matrix) = 0;

  // Whether whoever takes matrices reads them where they lie (so it is at first), or copies them out of the files
  // behind them (file_place() of base/file.h): then their pages are not mapped ahead, and block scales are not looked
  // at. Who copies them does that (nvfp4::has_bad_scale).
  virtual void read_in_place(bool in_place) { static_cast<void>(in_place); }

  // Called when the model has taken all it needs: an Error that lists tensors nobody asked for, unless they are known
  // to be skippable (vision tower; the MTP head when it is not loaded).
  virtual void finish() = 0;
};

}  // namespace fourfold::model
