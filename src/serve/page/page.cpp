#include "serve/page/page.h"

#include <string>

namespace fourfold::serve {
namespace {

// Its own style and script, told by their hashes; requests to this server; nothing else: no pictures but the icon that
// is in it, no frames around it, no text that becomes markup.
std::string policy(const EmbeddedPage& page) {
  return fmt::format(
      "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; "
      "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
      page.script, page.style);
}

// Whether one of the tags in If-None-Match is this one, compared weakly (RFC 9110, 13.1.2): something in between may
// have compressed the page.
bool has_it(const HttpRequest& request, std::string_view tag) {
  const std::string* given = request.header("if-none-match");
  return given != nullptr && (*given == "*" || given->find(tag) != std::string::npos);
}

}  // namespace

void page(Service& service, const std::shared_ptr<ApiCall>& call) {
  const EmbeddedPage& page = embedded_page();
  HttpResponse response;
  response.status = has_it(call->exchange->request(), page.tag) ? 304 : 200;
  response.headers = {{"content-type", "text/html; charset=utf-8"},
                      {"etag", std::string(page.tag)},
                      {"cache-control", "no-cache"},  // kept, and asked for again by its tag
                      {"content-security-policy", policy(page)},
                      {"cross-origin-opener-policy", "same-origin"},
                      {"cross-origin-resource-policy", "same-origin"},
                      {"referrer-policy", "no-referrer"},
                      {"x-content-type-options", "nosniff"}};
  response.body = page.html;
  service.respond(call, std::move(response));
}

}  // namespace fourfold::serve
