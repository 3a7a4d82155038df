#include "cuda/device/counting_driver.h"

#include <atomic>
#include <cstdlib>

namespace fourfold::cuda {
namespace {

// Handles that are never looked at.
int something = 0;
int give(void** handle) {
  *handle = &something;
  return 0;
}

std::atomic<jit::DeviceAddress> next_address{jit::DeviceAddress{1} << 40};

}  // namespace

std::unique_ptr<const jit::Driver> counting_driver() {
  using jit::DeviceAddress;
  auto call = std::make_shared<jit::Driver::Functions>();
  call->init = [](unsigned) { return 0; };
  call->version = [](int* version) { return *version = 0; };
  call->device_count = [](int* count) {
    *count = 1;
    return 0;
  };
  call->device_get = [](int* device, int ordinal) {
    *device = ordinal;
    return 0;
  };
  call->primary_context = [](void** context, int) { return give(context); };
  call->set_current = [](void*) { return 0; };
  call->error_string = [](int, const char** text) {
    *text = "no card";
    return 0;
  };
  call->can_access_peer = [](int* can, int, int) { return *can = 1, 0; };
  call->enable_peer = [](void*, unsigned) { return 0; };
  call->memory_info = [](size_t* free, size_t* total) {
    *free = *total = 0;
    return 0;
  };
  call->memory_allocate = [](DeviceAddress* address, size_t bytes) {
    constexpr size_t kApart = 4096;
    *address = next_address.fetch_add((bytes + 2 * kApart) / kApart * kApart);
    return 0;
  };
  call->memory_free = [](DeviceAddress) { return 0; };
  call->host_allocate = [](void** memory, size_t bytes, unsigned) {
    *memory = std::calloc(bytes, 1);  // tokens that nobody chose are 0
    return *memory == nullptr ? 2 : 0;
  };
  call->host_free = [](void* memory) {
    std::free(memory);
    return 0;
  };
  call->copy_to_device = [](DeviceAddress, const void*, size_t, void*) { return 0; };
  call->copy_to_host = [](void*, DeviceAddress, size_t, void*) { return 0; };
  call->copy_on_device = [](DeviceAddress, DeviceAddress, size_t, void*) { return 0; };
  call->fill_bytes = [](DeviceAddress, unsigned char, size_t, void*) { return 0; };
  call->stream_create = [](void** stream, unsigned) { return give(stream); };
  call->stream_destroy = [](void*) { return 0; };
  call->stream_query = [](void*) { return 0; };
  call->event_create = [](void** event, unsigned) { return give(event); };
  call->event_destroy = [](void*) { return 0; };
  call->event_record = [](void*, void*) { return 0; };
  call->event_query = [](void*) { return 0; };
  return jit::Driver::of(std::move(call));
}

}  // namespace fourfold::cuda
