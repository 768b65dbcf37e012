#include "probes/names.h"

#include <cstdio>
#include <cstdlib>
#include <new>

namespace forkpoint {
namespace {

// Virtual sizes: pages are backed as they are touched.
constexpr uint32_t kTableCells = 1u << 20;
constexpr uint32_t kCommunicatorCells = 1u << 14;

constexpr size_t kHashSuffixBytes = 17;  // "~" and 16 hex digits

template <typename T>
uint64_t address_bits(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

bool same_numbers(const std::vector<int64_t>& known, const int64_t* numbers, int32_t dims) {
  if (!numbers) return known.empty();
  return known.size() == static_cast<size_t>(dims) && memcmp(known.data(), numbers, known.size() * sizeof(int64_t)) == 0;
}

std::vector<int64_t> copy_numbers(const int64_t* numbers, int32_t dims) {
  return numbers ? std::vector<int64_t>(numbers, numbers + dims) : std::vector<int64_t>();
}

}  // namespace

bool Name::equals(std::string_view key) const {
  if (key.size() <= NameTables::kMaxNameBytes) return view() == key;
  // A long one is known by its cut text and the hash of the whole, which the caller has compared.
  return length == NameTables::kMaxNameBytes + kHashSuffixBytes &&
         memcmp(text, key.data(), NameTables::kMaxNameBytes) == 0;
}

Name* Name::make(uint64_t hash, std::string_view key) {
  const bool cut = key.size() > NameTables::kMaxNameBytes;
  const size_t kept = cut ? NameTables::kMaxNameBytes : key.size();
  auto* name = static_cast<Name*>(malloc(sizeof(Name) + kept + kHashSuffixBytes));
  if (!name) return nullptr;
  name->hash = hash;
  memcpy(name->text, key.data(), kept);
  name->text[kept] = '\0';
  name->length = static_cast<uint32_t>(kept);
  if (cut) {
    // The suffix is written to the stream: it must be equal in both runs, and hash_bytes is (no addresses go in).
    snprintf(name->text + kept, kHashSuffixBytes + 1, "~%016llx", static_cast<unsigned long long>(hash));
    name->length += kHashSuffixBytes;
  }
  return name;
}

void Name::discard(Name* name) { free(name); }

bool CommunicatorEntry::equals(const CommunicatorKey& key) const {
  return name == key.name && id == key.id && own_rank == key.own_rank && size == key.size &&
         member_count == key.member_count &&
         memcmp(members, key.members, sizeof(int32_t) * static_cast<size_t>(member_count)) == 0;
}

CommunicatorEntry* CommunicatorEntry::make(uint64_t hash, const CommunicatorKey& key) {
  const size_t members_bytes = sizeof(int32_t) * static_cast<size_t>(key.member_count);
  auto* entry = static_cast<CommunicatorEntry*>(malloc(sizeof(CommunicatorEntry) + members_bytes));
  if (!entry) return nullptr;
  entry->hash = hash;
  entry->name = key.name;
  entry->id = key.id;
  entry->own_rank = key.own_rank;
  entry->size = key.size;
  entry->member_count = key.member_count;
  if (members_bytes) memcpy(entry->members, key.members, members_bytes);
  return entry;
}

void CommunicatorEntry::discard(CommunicatorEntry* entry) { free(entry); }

SiteEntry* SiteEntry::make(uint64_t hash, const SiteKey& key) { return new (std::nothrow) SiteEntry{hash, key, {}}; }
void SiteEntry::discard(SiteEntry* entry) { delete entry; }

bool LayoutEntry::equals(const LayoutKey& key) const {
  return layout.dtype == key.dtype && layout.shape.size() == static_cast<size_t>(key.dims) &&
         (key.dims == 0 || (same_numbers(layout.shape, key.shape, key.dims) &&
                            same_numbers(layout.strides, key.strides, key.dims) &&
                            same_numbers(layout.global_shape, key.global_shape, key.dims) &&
                            same_numbers(layout.global_offset, key.global_offset, key.dims)));
}

LayoutEntry* LayoutEntry::make(uint64_t hash, const LayoutKey& key) {
  try {
    auto* entry = new LayoutEntry{hash,
                                  {key.dtype, copy_numbers(key.shape, key.dims), copy_numbers(key.strides, key.dims),
                                   copy_numbers(key.global_shape, key.dims), copy_numbers(key.global_offset, key.dims)},
                                  0,
                                  {}};
    entry->size_bytes = static_cast<uint64_t>(element_count(entry->layout)) * static_cast<uint64_t>(forkpoint::size_bytes(key.dtype));
    return entry;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void LayoutEntry::discard(LayoutEntry* entry) { delete entry; }

bool NameTables::create() {
  return names_.create(kTableCells) && communicators_.create(kCommunicatorCells) && sites_.create(kTableCells) &&
         layouts_.create(kTableCells);
}

const Name* NameTables::name(const char* text) {
  const std::string_view key = text ? text : "";
  return names_.intern(hash_bytes(key.data(), key.size(), 1), key);
}

const CommunicatorEntry* NameTables::communicator(const CommunicatorKey& key) {
  const size_t members_bytes = sizeof(int32_t) * static_cast<size_t>(key.member_count);
  const uint64_t seed = address_bits(key.name) ^ mix64(key.id.a + static_cast<uint64_t>(key.own_rank));
  return communicators_.intern(hash_bytes(key.members, members_bytes, seed), key);
}

const SiteEntry* NameTables::site(const SiteKey& key) {
  const uint64_t numbers[] = {static_cast<uint64_t>(key.phase) | static_cast<uint64_t>(key.kind) << 8 |
                                  static_cast<uint64_t>(key.role) << 16,
                              address_bits(key.layer), address_bits(key.op), address_bits(key.tensor),
                              address_bits(key.communicator)};
  return sites_.intern(hash_bytes(numbers, sizeof(numbers), 2), key);
}

const LayoutEntry* NameTables::layout(const LayoutKey& key) {
  uint64_t hash = mix64(static_cast<uint64_t>(key.dtype) << 8 | static_cast<uint64_t>(key.dims));
  for (const int64_t* numbers : {key.shape, key.strides, key.global_shape, key.global_offset}) {
    const size_t size = numbers ? sizeof(int64_t) * static_cast<size_t>(key.dims) : 0;
    hash = hash_bytes(numbers ? static_cast<const void*>(numbers) : &key, size, hash);
  }
  return layouts_.intern(hash, key);
}

}  // namespace forkpoint
