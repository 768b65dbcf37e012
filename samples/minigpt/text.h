#pragma once

#include <string>
#include <string_view>

namespace minigpt {

// The text in text.txt: public domain, about 16 KB, part of the binary.
std::string_view embedded_text();

// The bytes of a file, or the embedded text when path is empty. Throws Error when it cannot be read.
std::string load_text(const std::string& path);

}  // namespace minigpt
