# cmake -DINPUT=text.txt -DOUTPUT=text.cpp -P embed_text.cmake
# A file's bytes as a C++ array, so that the program needs no file at run time.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUTPUT} "#include \"samples/minigpt/text.h\"

namespace {
constexpr unsigned char kBytes[] = {${bytes}};
}
std::string_view minigpt::embedded_text() { return {reinterpret_cast<const char*>(kBytes), sizeof(kBytes)}; }
")
