#include "probes/notes.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace forkpoint {
namespace {

Note* make_note(const char* what, size_t what_bytes, const char* detail, size_t detail_bytes) {
  auto* memory = static_cast<char*>(malloc(sizeof(Note) + what_bytes + detail_bytes + 2));
  if (!memory) return nullptr;
  char* text = memory + sizeof(Note);
  memcpy(text, what, what_bytes);
  text[what_bytes] = '\0';
  char* more = text + what_bytes + 1;
  memcpy(more, detail, detail_bytes);
  more[detail_bytes] = '\0';
  auto* note = new (memory) Note;
  note->what = text;
  note->detail = more;
  return note;
}

bool is_text(const char* text, const char* words, size_t bytes) { return strncmp(text, words, bytes) == 0 && text[bytes] == '\0'; }

}  // namespace

Note* NoteList::add(const char* what, const char* detail) {
  if (!detail) detail = "";
  const size_t what_bytes = strnlen(what, kMaxBytes), detail_bytes = strnlen(detail, kMaxBytes);
  Note* made = nullptr;
  for (auto& place : notes_) {
    Note* note = place.load(std::memory_order_acquire);
    if (!note) {
      if (!made) made = make_note(what, what_bytes, detail, detail_bytes);
      if (!made || place.compare_exchange_strong(note, made, std::memory_order_acq_rel)) return made;
    }
    if (is_text(note->what, what, what_bytes) && is_text(note->detail, detail, detail_bytes)) {
      free(made);
      return note;
    }
  }
  free(made);
  return nullptr;
}

}  // namespace forkpoint
