# Two commands need nothing done before them: `make demo` and `make test`. Everything real is in CMakeLists.txt.
BUILD ?= build
PREFIX ?= /usr/local
CMAKE_ARGS ?=

.PHONY: all demo test bench install packages test-packages test-torch clean

all: packages
	@cmake -G Ninja -S . -B $(BUILD) $(CMAKE_ARGS) >$(BUILD)-configure.log 2>&1 || { cat $(BUILD)-configure.log; exit 1; }
	@rm -f $(BUILD)-configure.log
	@cmake --build $(BUILD)

packages:
	@.ci/packages

test-packages:
	@.ci/packages --with-fuzz

demo: all
	@samples/demo.sh $(BUILD)

# Fetches torch for the tests, once, while the build goes on; says how much that is.
test-torch:
	@tests/torch/install.sh --background || true

test: test-packages test-torch all
	@tests/run_all.sh $(BUILD)

bench: all
	@tests/bench/run.sh $(BUILD)

install: all
	cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf $(BUILD)
