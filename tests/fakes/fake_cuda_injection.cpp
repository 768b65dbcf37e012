// What CUDA_INJECTION64_PATH may name: counts how often it is called.
extern "C" __attribute__((visibility("default"))) int fake_injection_calls;
int fake_injection_calls = 0;

extern "C" __attribute__((visibility("default"))) int InitializeInjection() { return ++fake_injection_calls; }
