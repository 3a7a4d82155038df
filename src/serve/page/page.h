// The page at /: one file of HTML with its style and script in it, which a browser may use for nothing else than asking
// this server.
#pragma once

#include <string_view>

#include "serve/service.h"

namespace fourfold::serve {

// Made by the build from the files of this folder (cmake/embed_page.cmake).
struct EmbeddedPage {
  std::string_view html;
  std::string_view tag;    // of its contents, for ETag: in quotes
  std::string_view style;  // what the policy says of them: 'sha256-…' of the style, and of the script
  std::string_view script;
};

const EmbeddedPage& embedded_page();

// GET /: the page, or 304 where the browser has it already.
void page(Service& service, const std::shared_ptr<ApiCall>& call);

}  // namespace fourfold::serve
