// What is served, and by whom.
#pragma once

#include <memory>
#include <span>

#include "serve/fields.h"
#include "serve/service.h"

namespace fourfold::serve {

struct Route {
  const char* method;
  const char* path;
  ErrorForm form;
  bool open;  // without a key
  bool needs_model;
  bool generates;  // counts as work: admitted, refused while the server drains, away from the network's threads
  void (*handle)(Service& service, const std::shared_ptr<ApiCall>& call);
};

std::span<const Route> routes();

std::span<const FieldRule> tokenize_fields();
std::span<const FieldRule> detokenize_fields();

// ---- generation
void chat_completions(Service& service, const std::shared_ptr<ApiCall>& call);
void completions(Service& service, const std::shared_ptr<ApiCall>& call);
void responses(Service& service, const std::shared_ptr<ApiCall>& call);
void messages(Service& service, const std::shared_ptr<ApiCall>& call);

// ---- text
void stored_response(Service& service, const std::shared_ptr<ApiCall>& call);
void delete_response(Service& service, const std::shared_ptr<ApiCall>& call);
void count_message_tokens(Service& service, const std::shared_ptr<ApiCall>& call);
void tokenize(Service& service, const std::shared_ptr<ApiCall>& call);
void detokenize(Service& service, const std::shared_ptr<ApiCall>& call);

// ---- what the server says of itself
void health(Service& service, const std::shared_ptr<ApiCall>& call);
void live(Service& service, const std::shared_ptr<ApiCall>& call);
void version(Service& service, const std::shared_ptr<ApiCall>& call);
void openapi(Service& service, const std::shared_ptr<ApiCall>& call);
void metrics_text(Service& service, const std::shared_ptr<ApiCall>& call);
void models(Service& service, const std::shared_ptr<ApiCall>& call);
void one_model(Service& service, const std::shared_ptr<ApiCall>& call);
void tokenizer_info(Service& service, const std::shared_ptr<ApiCall>& call);
void props(Service& service, const std::shared_ptr<ApiCall>& call);
void server_info(Service& service, const std::shared_ptr<ApiCall>& call);
void model_info(Service& service, const std::shared_ptr<ApiCall>& call);

}  // namespace fourfold::serve
