// Opening and closing the memory of peers from Python.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxmoe {

// Adds peer_allocate, peer_connect, peer_disconnect and peer_free, see csrc/peers/memory.h, and
// peer_has_native_atomics.
void AddPeerMemory(nanobind::module_& m);

}  // namespace jaxmoe
