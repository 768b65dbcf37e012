// Switches of the fake libcupti, found with dlsym. FAKE_CUPTI_TAKEN=1 in the environment: as fake_cupti_set_taken(1).
#pragma once

#include <cstdint>

extern "C" {
void fake_cupti_set_taken(int taken);  // another tool has subscribed: cuptiSubscribe fails
int fake_cupti_subscribed();
uint64_t fake_cupti_callbacks();  // made so far
}
