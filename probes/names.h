// What records refer to by address: names, communicators, sites, layouts. See intern.h for their life and thread rules.
#pragma once

#include <cstdint>
#include <string_view>

#include "lib/record.h"
#include "probes/intern.h"

namespace forkpoint {

inline constexpr uint32_t kNoStreamId = UINT32_MAX;

// What the writer thread remembers with an entry: its id in the stream of that session. Nobody else reads it.
struct StreamId {
  uint32_t session = 0;
  uint32_t id = kNoStreamId;
};

struct Name {
  uint64_t hash;
  uint32_t length;
  char text[1];  // length bytes and a zero

  std::string_view view() const { return {text, length}; }
  bool equals(std::string_view key) const;
  static Name* make(uint64_t hash, std::string_view key);
  static void discard(Name* name);
};

struct CommunicatorKey {
  const Name* name;
  const int32_t* members;
  int32_t member_count;
  Digest id = {};          // these three: as Communicator (lib/record.h)
  int32_t own_rank = -1;
  int32_t size = 0;
};
struct CommunicatorEntry {
  uint64_t hash;
  const Name* name;  // empty: called by its members
  Digest id;
  int32_t own_rank;
  int32_t size;
  int32_t member_count;
  int32_t members[1];

  bool equals(const CommunicatorKey& key) const;
  static CommunicatorEntry* make(uint64_t hash, const CommunicatorKey& key);
  static void discard(CommunicatorEntry* entry);
};

struct SiteKey {
  Phase phase;
  Kind kind;
  Role role;
  const Name* layer;
  const Name* op;
  const Name* tensor;
  const CommunicatorEntry* communicator;  // nullptr: none
  friend bool operator==(const SiteKey&, const SiteKey&) = default;
};
struct SiteEntry {
  uint64_t hash;
  SiteKey key;
  mutable StreamId stream_id;

  bool equals(const SiteKey& other) const { return key == other; }
  static SiteEntry* make(uint64_t hash, const SiteKey& key);
  static void discard(SiteEntry* entry);
};

struct LayoutKey {
  DType dtype = DType::raw;
  int32_t dims = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;        // nullptr: contiguous
  const int64_t* global_shape = nullptr;   // nullptr: not a shard
  const int64_t* global_offset = nullptr;
};
struct LayoutEntry {
  uint64_t hash;
  Layout layout;
  uint64_t size_bytes;  // of the elements
  mutable StreamId stream_id;

  bool equals(const LayoutKey& key) const;
  static LayoutEntry* make(uint64_t hash, const LayoutKey& key);
  static void discard(LayoutEntry* entry);
};

// Each returns nullptr when there are too many distinct ones, or no memory. Any thread.
class NameTables {
 public:
  bool create();
  const Name* name(const char* text);  // nullptr counts as empty; more than kMaxNameBytes are cut, with a hash of the whole
  const CommunicatorEntry* communicator(const CommunicatorKey& key);
  const SiteEntry* site(const SiteKey& key);
  const LayoutEntry* layout(const LayoutKey& key);

  static constexpr uint32_t kMaxNameBytes = 4000;  // kernels of templates have long ones

 private:
  InternTable<Name> names_;
  InternTable<CommunicatorEntry> communicators_;
  InternTable<SiteEntry> sites_;
  InternTable<LayoutEntry> layouts_;
};

}  // namespace forkpoint
