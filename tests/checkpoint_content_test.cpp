// What is read from checkpoint files, and how two of them compare. tests/golden/checkpoints was written by torch itself.
#include "lib/checkpoint_content.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lib/checkpoint_compare.h"
#include "lib/error.h"
#include "lib/pickle.h"
#include "tests/support/checkpoint_files.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

const std::string kGolden = std::string(FORKPOINT_SOURCE_DIR) + "/tests/golden/checkpoints";

CheckpointContent read(const std::string& path) {
  CheckpointContent content = read_content(path);
  digest_content(&content);
  return content;
}

const CheckpointTensor& tensor(const CheckpointContent& content, const std::string& name) {
  const auto found = content.tensors.find({"", name});
  REQUIRE_MESSAGE(found != content.tensors.end(), name);
  CHECK_MESSAGE(found->second.unread.empty(), found->second.unread);
  return found->second;
}

template <typename T>
Digest digest_of(const std::vector<T>& values) {
  return digest_only(values.data(), values.size() * sizeof(T));
}

std::vector<float> counting(int n) {
  std::vector<float> values;
  for (int i = 0; i < n; ++i) values.push_back(static_cast<float>(i));
  return values;
}

std::vector<MadeTensor> three() {
  return {{"layers.2.w", {2, 3}, {1, 2, 3, 4, 5, 6}}, {"layers.10.w", {2}, {7, 8}}, {"bias", {1}, {9}}};
}

CheckpointComparison compared(const std::string& a, const std::string& b, bool tensors_only = false) {
  return compare_checkpoints(read(a), read(b), tensors_only);
}

}  // namespace

TEST_CASE("torch.save: tensors, views, parameters and values, each in logical order") {
  const CheckpointContent content = read(kGolden + "/small.pt");
  CHECK(content.unread.empty());
  CHECK(content.tensors.size() == 7);
  CHECK(tensor(content, "model.weight").digest == digest_of(counting(24)));
  CHECK(tensor(content, "model.weight").shape == std::vector<int64_t>{4, 6});
  std::vector<float> transposed;
  for (int column = 0; column < 6; ++column) {
    for (int line = 0; line < 4; ++line) transposed.push_back(static_cast<float>(6 * line + column));
  }
  CHECK(tensor(content, "model.transposed").digest == digest_of(transposed));
  CHECK(tensor(content, "model.tail").digest == digest_of(std::vector<float>{13, 14, 15, 19, 20, 21}));
  CHECK(tensor(content, "model.half").dtype == DType::bf16);
  CHECK(tensor(content, "model.half").digest == digest_of(std::vector<uint16_t>{0, 0x3F80, 0x4000, 0x4040, 0x4080}));
  CHECK(tensor(content, "model.parameter").digest == digest_of(std::vector<float>{0.5, 0.5, 0.5}));
  CHECK(tensor(content, "model.scalar").digest == digest_of(std::vector<int64_t>{7}));
  CHECK(tensor(content, "model.empty").shape == std::vector<int64_t>{0, 3});
  const auto value = [&](const std::string& name) { return content.values.at({"", name}).text; };
  CHECK(value("step") == "100");
  CHECK(value("lr") == "0.1");
  CHECK(value("name") == "\"small\"");
  CHECK(value("betas.1") == "0.999");
  CHECK(value("none") == "None");
  CHECK(value("flag") == "True");
  CHECK(value("seeds").starts_with("bytes of 3 bytes"));
  CHECK(value("big").starts_with("int of 11 bytes"));
}

TEST_CASE("DCP: shards by rows and by columns come together as the whole tensor") {
  const CheckpointContent content = read(kGolden + "/dcp");
  CHECK(content.unread.empty());
  CHECK(tensor(content, "weight").parts.size() == 2);
  CHECK(tensor(content, "columns").parts.size() == 2);
  CHECK(tensor(content, "weight").digest == digest_of(counting(28)));
  CHECK(tensor(content, "columns").digest == digest_of(counting(28)));
  CHECK(tensor(content, "copy").digest == digest_of(counting(8)));
  CHECK(content.values.at({"", "step"}).text == "100");
}

TEST_CASE("a DCP checkpoint without one of its data files is never identical, not even with itself") {
  const TemporaryFolder folder;
  std::filesystem::copy(kGolden + "/dcp", folder / "a");
  CHECK(compared(kGolden + "/dcp", folder / "a").outcome == Outcome::identical);
  std::filesystem::remove(folder / "a/__1_0.distcp");
  const CheckpointComparison missing = compared(kGolden + "/dcp", folder / "a");
  CHECK(missing.outcome == Outcome::incomparable);
  CHECK_FALSE(missing.unread.empty());
  CHECK(compared(folder / "a", folder / "a").outcome == Outcome::incomparable);
}

TEST_CASE("one flipped bit is named with its tensor and element, in numbers' order of the names") {
  const TemporaryFolder folder;
  auto tensors = three();
  put_file(folder / "a.safetensors", made_safetensors(tensors));
  put_file(folder / "b.safetensors", made_safetensors(tensors));
  const CheckpointComparison same = compared(folder / "a.safetensors", folder / "b.safetensors");
  CHECK(same.outcome == Outcome::identical);
  CHECK(same.tensors_compared == 3);
  CHECK(same.bytes_compared == 36);
  tensors[0].values[4] = std::nextafter(tensors[0].values[4], 10.0f);
  tensors[1].values[0] = 0;
  put_file(folder / "b.safetensors", made_safetensors(tensors));
  const CheckpointComparison differ = compared(folder / "a.safetensors", folder / "b.safetensors");
  CHECK(differ.outcome == Outcome::diverged);
  CHECK(differ.reason == "2 of 3 tensors differ, first layers.2.w");
  REQUIRE(differ.tensors[0].pointing);
  CHECK(differ.tensors[0].pointing->tensor_index == std::vector<int64_t>{1, 1});
  CHECK(differ.tensors[0].pointing->delta == 1);
}

TEST_CASE("shards of Hugging Face compare whatever their number") {
  const TemporaryFolder folder;
  const auto all = three();
  put_file(folder / "a/model.safetensors", made_safetensors(all));
  put_file(folder / "b/model-00001-of-00002.safetensors", made_safetensors({all[0]}));
  put_file(folder / "b/model-00002-of-00002.safetensors", made_safetensors({all[1], all[2]}));
  CHECK(compared(folder / "a", folder / "b").outcome == Outcome::identical);
  CHECK(content_digest(read(folder / "a")) == content_digest(read(folder / "b")));
}

TEST_CASE("another shape of the same bytes, and a tensor that one side has alone, are differences") {
  const TemporaryFolder folder;
  auto tensors = three();
  put_file(folder / "a.safetensors", made_safetensors(tensors));
  tensors[0].shape = {3, 2};
  put_file(folder / "b.safetensors", made_safetensors(tensors));
  CHECK(compared(folder / "a.safetensors", folder / "b.safetensors").outcome == Outcome::diverged);
  tensors = three();
  tensors.pop_back();
  put_file(folder / "b.safetensors", made_safetensors(tensors));
  const CheckpointComparison less = compared(folder / "a.safetensors", folder / "b.safetensors");
  CHECK(less.outcome == Outcome::diverged);
  CHECK(less.only_a == std::vector<std::string>{"bias"});
}

TEST_CASE("names behind a wrapper's prefix are not merged: incomparable, and the prefix is named") {
  const TemporaryFolder folder;
  auto tensors = three();
  put_file(folder / "a.safetensors", made_safetensors(tensors));
  for (MadeTensor& made : tensors) made.name = "module." + made.name;
  put_file(folder / "b.safetensors", made_safetensors(tensors));
  const CheckpointComparison compared_names = compared(folder / "a.safetensors", folder / "b.safetensors");
  CHECK(compared_names.outcome == Outcome::incomparable);
  REQUIRE(compared_names.notes.size() == 1);
  CHECK(compared_names.notes[0].find("`module.`") != std::string::npos);
}

TEST_CASE("values beside the tensors count, unless only tensors are asked for") {
  const TemporaryFolder folder;
  for (const char* side : {"a", "b"}) put_file(folder / (std::string(side) + "/model.safetensors"), made_safetensors(three()));
  put_file(folder / "a/rank-0000.json", R"({"sampler": {"cursor": 5}})");
  put_file(folder / "b/rank-0000.json", R"({"sampler": {"cursor": 6}})");
  const CheckpointComparison all = compared(folder / "a", folder / "b");
  CHECK(all.outcome == Outcome::diverged);
  REQUIRE(all.values.size() == 1);
  CHECK(all.values[0].name == "rank-0000: sampler.cursor");
  CHECK(compared(folder / "a", folder / "b", true).outcome == Outcome::identical);
}

TEST_CASE("safetensors: an empty tensor begins where its neighbour does, whichever of them is named first") {
  const TemporaryFolder folder;
  const std::vector<MadeTensor> made = {{"z", {0, 3}, {}}, {"a", {2}, {1, 2}}, {"y", {0}, {}},
                                        {"x", {2, 0}, {}}, {"b", {1}, {3}},    {"c", {0}, {}}};
  put_file(folder / "a.safetensors", made_safetensors(made));
  const CheckpointContent content = read(folder / "a.safetensors");
  CHECK(content.unread.empty());
  CHECK(content.tensors.size() == 6);
  CHECK(tensor(content, "z").shape == std::vector<int64_t>{0, 3});
  CHECK(tensor(content, "b").digest == digest_of(std::vector<float>{3}));
  CHECK(compared(folder / "a.safetensors", folder / "a.safetensors").outcome == Outcome::identical);
  auto other = made;
  other[0].shape = {3, 0};
  put_file(folder / "b.safetensors", made_safetensors(other));
  CHECK(compared(folder / "a.safetensors", folder / "b.safetensors").outcome == Outcome::diverged);
  // An empty one within another is a damaged header.
  std::string inside = made_safetensors({{"a", {2}, {1, 2}}, {"z", {0}, {}}});
  inside.replace(inside.find("[8,8]"), 5, "[4,4]");
  put_file(folder / "b.safetensors", inside);
  CHECK_FALSE(read(folder / "b.safetensors").unread.empty());
}

TEST_CASE("safetensors: metadata that are no text are damage, not the text that they look like") {
  const TemporaryFolder folder;
  for (const char* value : {"\"1\"", "1"}) {
    const std::string header = R"({"__metadata__":{"step":)" + std::string(value) +
                               R"(},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
    const uint64_t size = header.size();
    put_file(folder / "m.safetensors", std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + header + "x");
    CHECK(read(folder / "m.safetensors").unread.empty() == (value[0] == '"'));
  }
}

TEST_CASE("torch.save: conjugated and negated views have the digests of the values that they stand for") {
  const CheckpointContent content = read(kGolden + "/views.pt");
  CHECK(content.unread.empty());
  CHECK(tensor(content, "plain").digest == digest_of(std::vector<float>{1, 2, 3, -4}));
  CHECK(tensor(content, "conj").digest == digest_of(std::vector<float>{1, -2, 3, 4}));
  CHECK(tensor(content, "neg").digest == digest_of(std::vector<float>{-2, 4}));
  CHECK(tensor(content, "both").digest == digest_of(std::vector<float>{-1, 2, -3, -4}));
  CHECK(tensor(content, "half").digest == digest_of(std::vector<uint16_t>{0xBC00, 0xC000}));
}

TEST_CASE("things that have one name, but not one kind of key, are a difference and are shown with their keys") {
  const TemporaryFolder folder;
  for (const char* side : {"a", "b"})
    put_file(folder / (std::string(side) + "/model.safetensors"), made_safetensors(three()));
  const auto of = [&](const std::string& a, const std::string& b) {
    put_file(folder / "a/state.json", a);
    put_file(folder / "b/state.json", b);
    return compared(folder / "a", folder / "b");
  };
  const CheckpointComparison list = of(R"({"l": [5]})", R"({"l": {"0": 5}})");
  CHECK(list.outcome == Outcome::diverged);
  REQUIRE(list.values.size() == 1);
  CHECK(list.values[0].name == "state: l.0");
  CHECK(list.values[0].a == R"(root["l"][list 0])");
  CHECK(list.values[0].b == R"(root["l"]["0"])");
  CHECK(of(R"({"a.b": 1, "a": {"c": 2}})", R"({"a": {"b": 1, "c": 2}})").outcome == Outcome::diverged);
  CHECK(of(R"({"a.b": 1, "a": {"b": 2}})", R"({"a.b": 2, "a": {"b": 1}})").outcome == Outcome::diverged);
  CHECK(of(R"({"a.b": 1, "a": {"b": 2}})", R"({"a": {"b": 2}, "a.b": 1})").outcome == Outcome::identical);
  const CheckpointContent content = read(folder / "a");
  CHECK(content.values.at({"state", R"(root["a"]["b"])"}).text == "2");
  CHECK(content.values.at({"state", R"(root["a.b"])"}).text == "1");
}

TEST_CASE("JSON: whole numbers of any length count to the last digit, as the state of a generator has them") {
  const TemporaryFolder folder;
  const auto of = [&](const std::string& number) {
    put_file(folder / "a/state.json",
             R"({"pcg": )" + number + R"(, "text": "18446744073709551617", "x": [1.5e300, -2]})");
    const CheckpointContent content = read(folder / "a");
    CHECK(content.unread.empty());
    CHECK(content.values.at({"state", "text"}).text == "\"18446744073709551617\"");
    CHECK(content.values.at({"state", "x.0"}).text == "1.5e+300");
    return content.values.at({"state", "pcg"}).text;
  };
  for (const char* number : {"274674114334540486603088602300644985544", "-274674114334540486603088602300644985543",
                             "18446744073709551616", "-9223372036854775809"}) {
    CHECK(of(number) == number);
  }
  CHECK(of("18446744073709551615") == "18446744073709551615");
  CHECK(of("274674114334540486603.5") == "2.746741143345405e+20");
}

TEST_CASE("a torch file of an unknown kind is incomparable, never identical") {
  const TemporaryFolder folder;
  for (const char* side : {"a", "b"}) {
    put_file(folder / (std::string(side) + "/model.safetensors"), made_safetensors(three()));
    put_file(folder / (std::string(side) + "/old.pt"), "\x80\x02something of torch 1.5");
  }
  CHECK(compared(folder / "a", folder / "b").outcome == Outcome::incomparable);
}

TEST_CASE("files cut at every byte, and with any byte changed, end in an answer, never identical to the whole when they are cut") {
  const TemporaryFolder folder;
  put_file(folder / "made.safetensors", made_safetensors(three()));
  for (const std::string& source : {kGolden + "/small.pt", folder / "made.safetensors"}) {
    const std::string whole = get_file(source);
    const CheckpointContent content = read(source);
    const std::string cut = folder / ("cut" + std::filesystem::path(source).extension().string());
    for (size_t size = 0; size < whole.size(); ++size) {
      put_file(cut, whole.substr(0, size));
      CHECK(compare_checkpoints(content, read(cut), false).outcome != Outcome::identical);
    }
    for (size_t at = 0; at < whole.size(); at += 3) {
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ 0x41);
      put_file(cut, changed);
      read(cut);
    }
  }
  std::filesystem::copy(kGolden + "/dcp", folder / "dcp");
  const std::string metadata = get_file(kGolden + "/dcp/.metadata");
  for (size_t size = 0; size < metadata.size(); ++size) {
    put_file(folder / "dcp/.metadata", metadata.substr(0, size));
    CHECK_FALSE(read(folder / "dcp").unread.empty());
  }
}

TEST_CASE("a zip entry whose two sizes disagree is damage") {
  const TemporaryFolder folder;
  const std::string whole = get_file(kGolden + "/small.pt");
  int entries = 0;
  for (size_t at = whole.find("PK\1\2"); at != whole.npos; at = whole.find("PK\1\2", at + 4), ++entries) {
    std::string changed = whole;
    changed[at + 24] = static_cast<char>(changed[at + 24] ^ 1);
    put_file(folder / "changed.pt", changed);
    CHECK_FALSE(read(folder / "changed.pt").unread.empty());
  }
  CHECK(entries > 5);
}

TEST_CASE("a pickle is data: what it would call stands as a name, and its limits end in an error") {
  const Pickle pickle = Pickle::parse("cos\nsystem\n(S'rm -rf /'\ntR.", "test");
  CHECK(pickle.callable_name(pickle[pickle.root()]) == "os.system");
  CHECK_THROWS_AS(Pickle::parse("", "test"), Error);
  CHECK_THROWS_AS(Pickle::parse("X\xff\xff\xff\x7fshort.", "test"), Error);
  CHECK_THROWS_AS(Pickle::parse("t.", "test"), Error);
  CHECK_THROWS_AS(Pickle::parse("L99999999999999999999L\n.", "test"),
                  Error);                                             // not the largest number that there is room for
  CHECK_THROWS_AS(Pickle::parse("cos\nsystem\n]R.", "test"), Error);  // no tuple of arguments
  CHECK_THROWS_AS(Pickle::parse("cos\nsystem\n)R]b]b.", "test"), Error);  // a state behind a state
}

TEST_CASE("numbers that JSON has not are read as Python writes them") {
  const TemporaryFolder folder;
  put_file(folder / "a/state.json", R"({"loss": NaN, "norm": -Infinity, "text": "a \"NaN\", b", "x": [Infinity, 1]})");
  const CheckpointContent content = read(folder / "a");
  CHECK(content.unread.empty());
  CHECK(content.values.at({"state", "loss"}).text == "NaN");
  CHECK(content.values.at({"state", "norm"}).text == "-Infinity");
  CHECK(content.values.at({"state", "text"}).text == R"("a "NaN", b")");
  CHECK(content.values.at({"state", "x.0"}).text == "Infinity");
  put_file(folder / "b/state.json", R"({"loss": NaX})");
  CHECK(read(folder / "b").unread.size() == 2);  // it is neither whole nor read
}

TEST_CASE("the folder that a checkpoint lies in is no difference, any other path or word is") {
  const TemporaryFolder folder;
  const auto put = [&](const std::string& run, const std::string& output, const std::string& optimizer, const char* runtime) {
    const std::string path = folder / (run + "/checkpoint-100");
    put_file(path + "/model.safetensors", made_safetensors(three()));
    put_file(path + "/args.bin", made_torch_file({{"output_dir", output}, {"optim", optimizer}, {"best_model_checkpoint", output + "/checkpoint-50"}}));
    put_file(path + "/trainer_state.json", R"({"log_history": [{"eval_runtime": )" + std::string(runtime) + R"(, "eval_loss": 1.5}]})");
    return path;
  };
  const std::string a = put("x/adam", folder / "x/adam", "adam", "1.25"), b = put("y/sgd", "y/sgd", "adam", "1.5");
  const CheckpointComparison same = compared(a, b);
  CHECK_MESSAGE(same.outcome == Outcome::identical, same.reason);
  REQUIRE(same.notes.size() == 1);
  CHECK(same.notes[0].starts_with("3 values differ that only name the folder"));
  // Each is called like its run's folder, and is no path.
  put("y/sgd", "y/sgd", "sgd", "1.25");
  const CheckpointComparison other = compared(a, b);
  CHECK(other.outcome == Outcome::diverged);
  REQUIRE(other.values.size() == 1);
  CHECK(other.values[0].name == "args: optim");
  put("y/sgd", "z/sgd", "adam", "1.25");  // a path elsewhere
  CHECK(compared(a, b).values.size() == 2);
}

TEST_CASE("data that are called like the folder of the run are a difference") {
  const TemporaryFolder folder;
  const auto put = [&](const std::string& run) {
    const std::string path = folder / (run + "/checkpoint-100");
    put_file(path + "/model.safetensors", made_safetensors(three()));
    put_file(path + "/args.bin", made_torch_file({{"dataset_path", run}, {"data", run + "/train.bin"}}));
    return path;
  };
  const CheckpointComparison other = compared(put("squad"), put("mnli"));
  CHECK(other.outcome == Outcome::diverged);
  CHECK(other.values.size() == 2);
}
