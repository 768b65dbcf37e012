#include "lib/elf_file.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "lib/error.h"
#include "lib/input_file.h"

namespace forkpoint {
namespace {

constexpr uint64_t kMostEntries = 1u << 24;  // of any table; a damaged count may be anything

template <typename T>
T read_at(const FileSlice& file, uint64_t offset) {
  T value;
  file.read(offset, &value, sizeof(value));
  return value;
}

template <typename T>
std::vector<T> read_table(const FileSlice& file, uint64_t offset, uint64_t count, const char* what) {
  if (count > kMostEntries) throw Error(fmt::format("{}: damaged: {} with {} entries.", file.path(), what, count));
  std::vector<T> table(count);
  const FileSlice part = file.part(offset, count * sizeof(T), what);
  if (count > 0) part.read(0, table.data(), count * sizeof(T));
  return table;
}

std::string text_at(const std::string& strings, uint64_t offset) {
  if (offset >= strings.size()) return {};
  return strings.substr(offset, strings.find('\0', offset) - offset);
}

// The identification; nothing: no ELF file that this could read.
std::optional<std::string> identification(const FileSlice& file) {
  if (file.size_bytes() < EI_NIDENT) return std::nullopt;
  std::string bytes = file.text(0, EI_NIDENT, "the identification");
  if (std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) return std::nullopt;
  return bytes;
}

template <typename Header, typename Segment>
std::vector<Segment> read_segments(const FileSlice& file, const Header& header) {
  if (header.e_phnum > 0 && header.e_phentsize != sizeof(Segment)) {
    throw Error(fmt::format("{}: damaged: segments of {} bytes, expected {}.", file.path(), header.e_phentsize,
                            sizeof(Segment)));
  }
  return read_table<Segment>(file, header.e_phoff, header.e_phnum, "its table of segments");
}

template <typename Segment>
std::string interpreter_of(const FileSlice& file, const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    if (segment.p_type != PT_INTERP) continue;
    const std::string text = file.text(segment.p_offset, std::min<uint64_t>(segment.p_filesz, 4096), "its interpreter");
    return text.substr(0, text.find('\0'));
  }
  return {};
}

// Only the dynamic section says it of position-independent files: libraries, programs with a loader, static ones.
bool is_position_independent_program(const std::vector<Elf64_Dyn>& dynamic) {
  return std::any_of(dynamic.begin(), dynamic.end(), [](const Elf64_Dyn& entry) {
    return entry.d_tag == DT_FLAGS_1 && (entry.d_un.d_val & DF_1_PIE) != 0;
  });
}

std::optional<uint64_t> offset_of(const std::vector<Elf64_Phdr>& segments, uint64_t address) {
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type == PT_LOAD && address >= segment.p_vaddr && address - segment.p_vaddr < segment.p_filesz) {
      return segment.p_offset + (address - segment.p_vaddr);
    }
  }
  return std::nullopt;
}

std::vector<Elf64_Dyn> dynamic_of(const FileSlice& file, const std::vector<Elf64_Phdr>& segments) {
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type != PT_DYNAMIC) continue;
    return read_table<Elf64_Dyn>(file, segment.p_offset, segment.p_filesz / sizeof(Elf64_Dyn), "its dynamic section");
  }
  return {};
}

std::vector<std::string> needed_of(const FileSlice& file, const std::vector<Elf64_Phdr>& segments,
                                   const std::vector<Elf64_Dyn>& dynamic) {
  uint64_t address = 0, size = 0;
  std::vector<uint64_t> names;
  for (const Elf64_Dyn& entry : dynamic) {
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRTAB) address = entry.d_un.d_ptr;
    if (entry.d_tag == DT_STRSZ) size = entry.d_un.d_val;
    if (entry.d_tag == DT_NEEDED) names.push_back(entry.d_un.d_val);
  }
  if (names.empty()) return {};
  const auto offset = offset_of(segments, address);
  if (!offset) throw Error(fmt::format("{}: damaged: the names of what it links lie in no segment.", file.path()));
  const std::string strings = file.text(*offset, size, "the names of what it links");
  std::vector<std::string> needed;
  for (const uint64_t name : names) needed.push_back(text_at(strings, name));
  return needed;
}

std::vector<Elf64_Shdr> sections_of(const FileSlice& file) {
  const auto header = read_at<Elf64_Ehdr>(file, 0);
  if (header.e_shoff == 0 || header.e_shnum == 0 || header.e_shentsize != sizeof(Elf64_Shdr)) return {};
  return read_table<Elf64_Shdr>(file, header.e_shoff, header.e_shnum, "its table of sections");
}

bool holds(const FileSlice& file, const std::string& text) {
  constexpr uint64_t kPiece = 4u << 20;
  for (uint64_t at = 0; at < file.size_bytes(); at += kPiece) {
    const uint64_t size = std::min(kPiece + text.size(), file.size_bytes() - at);  // texts may lie across the border
    if (file.text(at, size, "a piece").find(text) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

bool is_elf(const std::string& path) { return identification(open_slice(path)).has_value(); }

ElfFile read_elf(const std::string& path) {
  const FileSlice file = open_slice(path);
  const auto bytes = identification(file);
  if (!bytes) throw Error(fmt::format("{}: is no ELF file.", path));
  if ((*bytes)[EI_DATA] != ELFDATA2LSB) throw Error(fmt::format("{}: is not little-endian.", path));
  ElfFile found;
  found.bits = (*bytes)[EI_CLASS] == ELFCLASS32 ? 32 : 64;
  if (found.bits == 32) {
    const auto header = read_at<Elf32_Ehdr>(file, 0);
    found.machine = header.e_machine;
    found.interpreter = interpreter_of(file, read_segments<Elf32_Ehdr, Elf32_Phdr>(file, header));
    found.is_program = header.e_type == ET_EXEC || !found.interpreter.empty();
    return found;
  }
  const auto header = read_at<Elf64_Ehdr>(file, 0);
  found.machine = header.e_machine;
  const auto segments = read_segments<Elf64_Ehdr, Elf64_Phdr>(file, header);
  found.interpreter = interpreter_of(file, segments);
  const std::vector<Elf64_Dyn> dynamic = dynamic_of(file, segments);
  found.needed = needed_of(file, segments, dynamic);
  // The C library asks for a loader too, since it can be run; it has a name to be linked by, which no program has.
  const bool has_name =
      std::any_of(dynamic.begin(), dynamic.end(), [](const Elf64_Dyn& e) { return e.d_tag == DT_SONAME; });
  found.is_program =
      header.e_type == ET_EXEC || is_position_independent_program(dynamic) || (!found.interpreter.empty() && !has_name);
  for (const Elf64_Shdr& section : sections_of(file)) found.has_symbols |= section.sh_type == SHT_SYMTAB;
  return found;
}

SymbolPlace find_symbol(const std::string& path, std::string_view symbol) {
  const FileSlice file = open_slice(path);
  const auto sections = sections_of(file);
  SymbolPlace place = SymbolPlace::absent;
  const bool is_program = read_elf(path).is_program;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_DYNSYM && section.sh_type != SHT_SYMTAB) continue;
    if (section.sh_link >= sections.size()) throw Error(fmt::format("{}: damaged: symbols without names.", path));
    const Elf64_Shdr& names = sections[section.sh_link];
    const std::string strings = file.text(names.sh_offset, names.sh_size, "the names of its symbols");
    for (const Elf64_Sym& entry :
         read_table<Elf64_Sym>(file, section.sh_offset, section.sh_size / sizeof(Elf64_Sym), "its table of symbols")) {
      if (entry.st_name >= strings.size() || strings.compare(entry.st_name, symbol.size(), symbol) != 0) continue;
      const char behind =
          entry.st_name + symbol.size() < strings.size() ? strings[entry.st_name + symbol.size()] : '\0';
      if (behind != '\0' && behind != '@') continue;  // name@VERSION in the inner table
      if (entry.st_shndx == SHN_UNDEF) {
        place = SymbolPlace::elsewhere;
      } else if (section.sh_type == SHT_DYNSYM && !is_program) {
        return SymbolPlace::exported;
      } else {
        // A program's own definition comes before any preloaded one, exported or not.
        return SymbolPlace::inside;
      }
    }
  }
  return place;
}

bool holds_texts(const std::string& path, const std::vector<std::string>& texts) {
  const FileSlice file = open_slice(path);
  return std::all_of(texts.begin(), texts.end(), [&](const std::string& text) { return holds(file, text); });
}

uint16_t own_elf_machine() {
#if defined(__x86_64__)
  return EM_X86_64;
#elif defined(__aarch64__)
  return EM_AARCH64;
#else
  return EM_NONE;
#endif
}

std::string elf_machine_name(uint16_t machine) {
  if (machine == EM_X86_64) return "x86-64";
  if (machine == EM_AARCH64) return "AArch64";
  if (machine == EM_386) return "i386";
  return fmt::format("machine {}", machine);
}

}  // namespace forkpoint
