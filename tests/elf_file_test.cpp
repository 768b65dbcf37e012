#include "lib/elf_file.h"

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "lib/error.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string header(unsigned char bits, uint16_t type, uint16_t machine) {
  std::string bytes(bits == ELFCLASS64 ? sizeof(Elf64_Ehdr) : sizeof(Elf32_Ehdr), '\0');
  std::memcpy(bytes.data(), ELFMAG, SELFMAG);
  bytes[EI_CLASS] = static_cast<char>(bits);
  bytes[EI_DATA] = ELFDATA2LSB;
  std::memcpy(bytes.data() + 16, &type, sizeof(type));
  std::memcpy(bytes.data() + 18, &machine, sizeof(machine));
  return bytes;
}

std::string libc_path() {
  Dl_info info = {};
  REQUIRE(dladdr(reinterpret_cast<void*>(&std::fopen), &info) != 0);
  return info.dli_fname;
}

}  // namespace

TEST_CASE("this program asks for a loader and links the C library") {
  const ElfFile own = read_elf("/proc/self/exe");
  CHECK(own.bits == 64);
  CHECK(own.machine == own_elf_machine());
  CHECK(own.is_program);
  CHECK_FALSE(own.is_static_program());
  CHECK(own.interpreter.find("ld-linux") != std::string::npos);
  CHECK(std::find(own.needed.begin(), own.needed.end(), "libc.so.6") != own.needed.end());
}

TEST_CASE("a library is no program, not even the C library, which asks for a loader") {
  const ElfFile library = read_elf(libc_path());
  CHECK_FALSE(library.is_program);  // although it asks for a loader, and can be run
  CHECK_FALSE(library.is_static_program());
  CHECK(is_elf(libc_path()));
}

TEST_CASE("a program of 64 bits without a loader is static, one of 32 bits is told by its size") {
  const TemporaryFolder folder;
  write_file(folder / "static", header(ELFCLASS64, ET_EXEC, EM_X86_64));
  CHECK(read_elf(folder / "static").is_static_program());
  write_file(folder / "small", header(ELFCLASS32, ET_EXEC, EM_386));
  const ElfFile small = read_elf(folder / "small");
  CHECK(small.bits == 32);
  CHECK(elf_machine_name(small.machine) == "i386");
  write_file(folder / "library", header(ELFCLASS64, ET_DYN, EM_X86_64));
  CHECK_FALSE(read_elf(folder / "library").is_program);
}

TEST_CASE("a script and an empty file are no ELF files, and a missing one is an error") {
  const TemporaryFolder folder;
  write_file(folder / "script", "#!/bin/sh\necho\n");
  write_file(folder / "empty", "");
  CHECK_FALSE(is_elf(folder / "script"));
  CHECK_FALSE(is_elf(folder / "empty"));
  CHECK_THROWS_AS(is_elf(folder / "missing"), Error);
  CHECK_THROWS_AS(read_elf(folder / "script"), Error);
}

TEST_CASE(
    "a function that is linked comes from elsewhere, one of a library's own is exported, one of a program's is "
    "inside") {
  CHECK(find_symbol("/proc/self/exe", "dladdr") == SymbolPlace::elsewhere);
  CHECK(find_symbol("/proc/self/exe", "no_such_function_anywhere") == SymbolPlace::absent);
  CHECK(find_symbol(libc_path(), "fopen") == SymbolPlace::exported);
  if (read_elf("/proc/self/exe").has_symbols) CHECK(find_symbol("/proc/self/exe", "main") == SymbolPlace::inside);
  // Not by the beginning of a name, nor by its end.
  CHECK(find_symbol("/proc/self/exe", "dladd") == SymbolPlace::absent);
  CHECK(find_symbol("/proc/self/exe", "laddr") == SymbolPlace::absent);
}

TEST_CASE("texts are found wherever they lie, also across the border of what is read at once") {
  const TemporaryFolder folder;
  std::string bytes(9u << 20, 'x');
  bytes.replace((4u << 20) - 3, 6, "BORDER");
  bytes.replace(bytes.size() - 3, 3, "END");
  write_file(folder / "large", bytes);
  CHECK(holds_texts(folder / "large", {"BORDER", "END"}));
  CHECK_FALSE(holds_texts(folder / "large", {"BORDER", "MISSING"}));
}

TEST_CASE("a program that was cut anywhere is an error or is read, and never more") {
  const TemporaryFolder folder;
  const std::string whole = content_of("/proc/self/exe");
  for (size_t size = 0; size < whole.size(); size = size * 5 / 4 + 7) {
    CAPTURE(size);
    write_file(folder / "cut", whole.substr(0, size));
    try {
      if (is_elf(folder / "cut")) read_elf(folder / "cut");
      find_symbol(folder / "cut", "malloc");
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("cut") != std::string::npos);
    }
  }
}

TEST_CASE("counts and places that a damaged header invents are refused") {
  const TemporaryFolder folder;
  const std::string whole = content_of("/proc/self/exe");
  for (size_t at = 16; at < sizeof(Elf64_Ehdr); ++at) {
    CAPTURE(at);
    std::string damaged = whole;
    damaged[at] = static_cast<char>(0xff);
    write_file(folder / "damaged", damaged);
    try {
      read_elf(folder / "damaged");
      find_symbol(folder / "damaged", "malloc");
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("damaged") != std::string::npos);
    }
  }
}

}  // namespace forkpoint
