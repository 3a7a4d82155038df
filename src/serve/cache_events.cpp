#include "serve/cache_events.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <msgpack.hpp>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "base/check.h"
#include "base/console.h"
#include "base/json.h"

namespace fourfold::serve {
namespace {

constexpr auto kReplayPoll = std::chrono::milliseconds(100);
// Where the blocks are: vLLM's name for the memory that the model computes from, whatever the processor.
constexpr const char* kMedium = "GPU";

// The highest byte first.
std::string sequence_bytes(int64_t number) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(static_cast<uint64_t>(number) >> (56 - 8 * i));
  return out;
}

int64_t sequence_number(std::string_view bytes) {
  uint64_t out = 0;
  for (const char c : bytes) out = out << 8 | static_cast<unsigned char>(c);
  return static_cast<int64_t>(out);
}

// The engine's thread adds events; one of its own encodes, sends, and answers who asks for older ones.
class Publisher final : public engine::CacheObserver {
 public:
  Publisher(const CacheEventsOptions& options, int64_t block_size)
      : options_(options), block_size_(block_size), publisher_(context_, zmq::socket_type::pub) {
    publisher_.set(zmq::sockopt::sndhwm, static_cast<int>(options.high_water_mark));
    publisher_.set(zmq::sockopt::linger, 0);
    open(publisher_, options.endpoint, "endpoint");
    if (!options.replay_endpoint.empty()) {
      replay_.emplace(context_, zmq::socket_type::router);
      replay_->set(zmq::sockopt::linger, 0);
      open(*replay_, options.replay_endpoint, "replay_endpoint");
    }
    thread_ = std::thread([this] { run(); });
  }
  ~Publisher() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void stored(std::optional<uint64_t> parent, std::span<const uint64_t> blocks,
              std::span<const int32_t> tokens) override {
    add({CacheEvent::Kind::kStored, {blocks.begin(), blocks.end()}, parent, {tokens.begin(), tokens.end()}});
  }
  void removed(uint64_t block) override { add({CacheEvent::Kind::kRemoved, {block}, std::nullopt, {}}); }
  void cleared() override { add({CacheEvent::Kind::kCleared, {}, std::nullopt, {}}); }

 private:
  // As vLLM decides it: an address with a wild card, or one that has no machine in it, is bound, another connected to.
  static void open(zmq::socket_t& socket, const std::string& endpoint, const char* what) {
    const bool binds = endpoint.find('*') != std::string::npos || endpoint.find("::") != std::string::npos ||
                       endpoint.starts_with("ipc://") || endpoint.starts_with("inproc://");
    try {
      if (endpoint.find('[') != std::string::npos) socket.set(zmq::sockopt::ipv6, true);
      binds ? socket.bind(endpoint) : socket.connect(endpoint);
    } catch (const zmq::error_t& error) {
      fail("--kv-events-config: cannot open {} {}: {}", what, printable(endpoint, 200), error.what());
    }
  }

  void add(CacheEvent event) {
    {
      const std::lock_guard lock(mutex_);
      if (static_cast<int64_t>(waiting_.size()) >= options_.max_queue_size) {
        // What is lost must not be believed to be there.
        waiting_.clear();
        waiting_.push_back({CacheEvent::Kind::kCleared, {}, std::nullopt, {}});
      }
      // Pages that are given up together are told of together.
      if (event.kind == CacheEvent::Kind::kRemoved && !waiting_.empty() &&
          waiting_.back().kind == CacheEvent::Kind::kRemoved) {
        waiting_.back().blocks.push_back(event.blocks.front());
        return;
      }
      waiting_.push_back(std::move(event));
    }
    wake_.notify_one();
  }

  void run() {
    try {
      for (;;) {
        std::vector<CacheEvent> events;
        {
          std::unique_lock lock(mutex_);
          const auto ready = [this] { return stopping_ || !waiting_.empty(); };
          replay_ ? static_cast<void>(wake_.wait_for(lock, kReplayPoll, ready)) : wake_.wait(lock, ready);
          events.swap(waiting_);
          if (events.empty() && stopping_) return;
        }
        for (std::span<const CacheEvent> rest = events; !rest.empty();) {
          const size_t count = cache_events_of_message(rest);
          const auto now = std::chrono::system_clock::now().time_since_epoch();
          publish(encode_cache_events(std::chrono::duration<double>(now).count(), rest.first(count), block_size_));
          rest = rest.subspan(count);
        }
        while (replay_ && replay()) {
        }
      }
    } catch (const zmq::error_t& error) {
      eprint("fourfold: cache events end: {}\n", error.what());
    }
  }

  void publish(std::string payload) {
    const int64_t number = next_++;
    publisher_.send(zmq::buffer(options_.topic), zmq::send_flags::sndmore);
    publisher_.send(zmq::buffer(sequence_bytes(number)), zmq::send_flags::sndmore);
    publisher_.send(zmq::buffer(payload), zmq::send_flags::none);
    held_.emplace_back(number, std::move(payload));
    if (static_cast<int64_t>(held_.size()) > options_.buffer_steps) held_.pop_front();
  }

  // Answers one who asks; false when nobody does. A request is the asker's name, an empty part, and a number.
  bool replay() {
    std::vector<std::string> parts;
    for (bool more = true; more;) {
      zmq::message_t message;
      if (!replay_->recv(message, zmq::recv_flags::dontwait)) return false;
      parts.push_back(message.to_string());
      more = message.more();
    }
    if (parts.size() != 3 || !parts[1].empty() || parts[2].size() != 8) return true;
    const int64_t first = sequence_number(parts[2]);
    const auto send = [&](const std::string& topic, int64_t number, const std::string& payload) {
      const auto more = zmq::send_flags::sndmore | zmq::send_flags::dontwait;
      replay_->send(zmq::buffer(parts[0]), more);
      replay_->send(zmq::buffer(std::string()), more);
      replay_->send(zmq::buffer(topic), more);
      replay_->send(zmq::buffer(sequence_bytes(number)), more);
      replay_->send(zmq::buffer(payload), zmq::send_flags::dontwait);
    };
    for (const auto& [number, payload] : held_) {
      if (number >= first) send(options_.topic, number, payload);
    }
    send("", -1, "");
    return true;
  }

  const CacheEventsOptions options_;
  const int64_t block_size_;
  zmq::context_t context_{1};
  zmq::socket_t publisher_;
  std::optional<zmq::socket_t> replay_;
  int64_t next_ = 0;
  std::deque<std::pair<int64_t, std::string>> held_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<CacheEvent> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

// Every field that vLLM always sends is there, and no other: vLLM's router refuses events with more or less.
std::string encode_cache_events(double seconds, std::span<const CacheEvent> events, int64_t block_size) {
  msgpack::sbuffer buffer;
  msgpack::packer out(buffer);
  out.pack_array(3);
  out.pack(seconds);
  out.pack_array(static_cast<uint32_t>(events.size()));
  const auto begin = [&](uint32_t fields, const char* type) {
    out.pack_map(fields);
    out.pack("type");
    out.pack(type);
  };
  const auto field = [&](const char* name, const auto& value) {
    out.pack(name);
    out.pack(value);
  };
  const auto nothing = [&](const char* name) {
    out.pack(name);
    out.pack_nil();
  };
  for (const CacheEvent& event : events) {
    switch (event.kind) {
      case CacheEvent::Kind::kStored:
        begin(8, "BlockStored");
        field("block_hashes", event.blocks);
        event.parent ? field("parent_block_hash", *event.parent) : nothing("parent_block_hash");
        field("token_ids", event.tokens);
        field("block_size", block_size);
        nothing("lora_id");
        field("medium", kMedium);
        nothing("lora_name");
        break;
      case CacheEvent::Kind::kRemoved:
        begin(3, "BlockRemoved");
        field("block_hashes", event.blocks);
        field("medium", kMedium);
        break;
      case CacheEvent::Kind::kCleared:
        begin(1, "AllBlocksCleared");
        break;
    }
  }
  out.pack(0);
  return {buffer.data(), buffer.size()};
}

size_t cache_events_of_message(std::span<const CacheEvent> events) {
  constexpr size_t kMaxEvents = 1024, kMaxNumbers = 500'000;  // a number has 9 bytes at most
  size_t numbers = 0, count = 0;
  for (const CacheEvent& event : events.first(std::min(events.size(), kMaxEvents))) {
    numbers += event.blocks.size() + event.tokens.size() + 16;
    if (count > 0 && numbers > kMaxNumbers) break;
    ++count;
  }
  return count;
}

CacheEventsOptions CacheEventsOptions::read(std::string_view text, bool& enabled) {
  constexpr const char* kName = "--kv-events-config";
  const Json json = parse_json(text, kName);
  if (!json.is_object()) fail("{} is {}, an object is wanted", kName, json_kind(json));
  CacheEventsOptions out;
  enabled = true;
  const auto words = [&](const std::string& key, const Json& value) {
    if (!value.is_string()) fail("{}: {} is {}, a string is wanted", kName, key, json_kind(value));
    return value.get<std::string>();
  };
  const auto count = [&](const std::string& key, const Json& value) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 || value.get<uint64_t>() > 100'000'000) {
      fail("{}: {} is {}, an integer from 1 to 100000000 is wanted", kName, key, printable(value.dump(), 60));
    }
    return value.get<int64_t>();
  };
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) continue;
    if (key == "enable_kv_cache_events") {
      if (!value.is_boolean()) fail("{}: {} is {}, true or false is wanted", kName, key, json_kind(value));
      enabled = value.get<bool>();
    } else if (key == "publisher") {
      const std::string publisher = words(key, value);
      if (publisher != "zmq" && publisher != "null") {
        fail("{}: publisher is {}, wanted zmq or null", kName, printable(publisher, 60));
      }
      enabled = enabled && publisher == "zmq";
    } else if (key == "endpoint") {
      out.endpoint = words(key, value);
    } else if (key == "replay_endpoint") {
      out.replay_endpoint = words(key, value);
    } else if (key == "topic") {
      out.topic = words(key, value);
    } else if (key == "buffer_steps") {
      out.buffer_steps = count(key, value);
    } else if (key == "hwm") {
      out.high_water_mark = count(key, value);
    } else if (key == "max_queue_size") {
      out.max_queue_size = count(key, value);
    } else {
      fail(
          "{}: {} is not known, wanted enable_kv_cache_events, publisher, endpoint, replay_endpoint, topic, "
          "buffer_steps, hwm or max_queue_size",
          kName, printable(key, 60));
    }
  }
  return out;
}

std::shared_ptr<engine::CacheObserver> publish_cache_events(const CacheEventsOptions& options, int64_t block_size) {
  return std::make_shared<Publisher>(options, block_size);
}

}  // namespace fourfold::serve
