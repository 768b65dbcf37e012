// A program or library as the loader would see it: can a library be preloaded into it, what does it link, whose symbols
// are its own. Files are only read, nothing of them runs. Little-endian files, as on every machine that has CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

struct ElfFile {
  int bits = 64;                    // of 32-bit files nothing below but machine and interpreter is read
  uint16_t machine = 0;             // e_machine: 62 x86-64, 183 AArch64
  bool is_program = false;          // it may be run: an executable, or position independent with an interpreter
  std::string interpreter;          // the loader that it asks for; empty: a library, or statically linked
  std::vector<std::string> needed;  // sonames
  bool has_symbols = false;         // a table of its inner symbols was not stripped
  bool is_static_program() const { return is_program && interpreter.empty(); }
};

// Nothing when it is no ELF file (a script, say). Throws Error when it cannot be read or is damaged.
bool is_elf(const std::string& path);
ElfFile read_elf(const std::string& path);

// Where a function comes from.
enum class SymbolPlace : uint8_t {
  absent,     // not named in any table of symbols that the file has
  elsewhere,  // undefined: from another library, by name, so that a preloaded one comes first
  exported,   // defined, and known to the loader by name
  inside,     // defined, bound within the file: nobody can come before it
};
// As read_elf. Of a 64-bit file.
SymbolPlace find_symbol(const std::string& path, std::string_view symbol);
// Whether all these texts occur in the file, anywhere. For files whose symbols were stripped.
bool holds_texts(const std::string& path, const std::vector<std::string>& texts);

uint16_t own_elf_machine();
std::string elf_machine_name(uint16_t machine);  // "x86-64", "machine 40"

}  // namespace forkpoint
