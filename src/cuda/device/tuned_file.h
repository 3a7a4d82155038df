// Files of what was measured on a card, kept beside the kernel store. The name is the SHA-256 of an identity: JSON text
// of all that decides what is fastest and can change (card, driver, sources). The content is JSON with that identity
// written out, and in a last line the SHA-256 of everything before it; it is replaced as a whole.
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "base/json_forward.h"

namespace fourfold::cuda {

// Of all device sources, and of what else measurements depend on.
std::string sources_hash(std::span<const std::string> more = {});

// Gives `read` the content and the file's path. False: there is no file, or, with a warning on stderr, one that is
// damaged, is of another identity, or that `read` has thrown an Error about.
bool load_tuned(const std::filesystem::path& store, const std::string& identity,
                const std::function<void(const Json& content, const std::filesystem::path& path)>& read);
// `content`: an object, to which the identity is added. The file's path.
std::filesystem::path save_tuned(const std::filesystem::path& store, const std::string& identity, Json content);

}  // namespace fourfold::cuda
