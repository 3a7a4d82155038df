// The store: what goes in comes out or is refused, whatever happens to the files and whoever else writes.
#include "jit/store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "jit/sha256.h"
#include "testing.h"

namespace fourfold::jit {
namespace {
namespace fs = std::filesystem;

Key key(std::string_view seed) { return to_hex(sha256(seed)); }

Entry entry(const std::string& name) {
  Entry e;
  e.name = name;
  e.arch = "sm_120a";
  e.compiler = "nvrtc 13.0";
  e.lowered = {{"ns::k<1>", name}};
  e.spill_bytes = 12;
  e.cubin = hand_made_cubin(name, 40, 0, 0);
  return e;
}

fs::path file_of(const KernelStore& store, const Key& k) { return store.directory() / (k + ".kernel"); }

TEST(Store, GivesBackWhatWasSaved) {
  const TemporaryDirectory dir;
  KernelStore store(dir.path() / "a" / "b");
  EXPECT_FALSE(store.load(key("1")).has_value());
  store.save(key("1"), entry("one"));
  const auto e = store.load(key("1"));
  ASSERT_TRUE(e.has_value());
  EXPECT_EQ(e->name, "one");
  EXPECT_EQ(e->arch, "sm_120a");
  EXPECT_EQ(e->compiler, "nvrtc 13.0");
  EXPECT_EQ(e->lowered.at("ns::k<1>"), "one");
  EXPECT_EQ(e->spill_bytes, 12);
  EXPECT_EQ(e->cubin, entry("one").cubin);
  ASSERT_EQ(e->kernels.size(), 1u);
  EXPECT_EQ(e->kernels[0].registers, 40);
  EXPECT_EQ(store.counters().hits, 1);
  EXPECT_EQ(store.counters().misses, 1);
  EXPECT_EQ(store.keys(), std::vector<Key>{key("1")});
}

TEST(Store, KeysEntriesAndPacksAreTheSameOnEveryProcessor) {
  // Found on x86-64 and on arm64: what one packs the other imports.
  CompileRequest request;
  request.sources = {"probe.cu", "#include \"a.h\"\n__global__ void probe(int n) {}", {{"a.h", "// nothing\n"}}};
  request.arch = "sm_90a";
  const Key k = key_of(request, "nvrtc 13.0");
  EXPECT_EQ(k, "97c0bf49773dca1c5b03ba8fe52f0d39e968284eb76465bd05dffff11b4cbdde");
  const TemporaryDirectory dir;
  KernelStore store(dir.path() / "store");
  store.save(k, entry("one"));
  EXPECT_EQ(to_hex(sha256(read_file(file_of(store, k)))),
            "d1c25668b4f49698523cad7359ab92e90709947f61190344e20980123acee54c");
  store.write_pack(dir.path() / "pack", {k});
  EXPECT_EQ(to_hex(sha256(read_file(dir.path() / "pack"))),
            "6809a3b5e752dd18bc67ff42447def74784c7aead5b5f0b2b69bdedaf1ae59d8");
}

TEST(Store, TheSameContentMakesTheSameFile) {
  // No date, path, process or order of insertion: two machines produce equal bytes.
  const TemporaryDirectory a, b;
  KernelStore first(a.path()), second(b.path());
  first.save(key("1"), entry("one"));
  second.save(key("1"), entry("one"));
  EXPECT_EQ(read_file(file_of(first, key("1"))), read_file(file_of(second, key("1"))));
}

TEST(Store, AnyDamagedByteIsFoundAndTheEntryRemoved) {
  const TemporaryDirectory dir;
  KernelStore store(dir.path());
  store.save(key("1"), entry("one"));
  const std::string good = read_file(file_of(store, key("1")));
  int64_t damaged = 0;
  testing::internal::CaptureStderr();
  for (size_t at = 0; at < good.size(); at += 11) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    write_file_atomically(file_of(store, key("1")), bad);
    EXPECT_FALSE(store.load(key("1")).has_value()) << at;
    EXPECT_EQ(store.counters().damaged, ++damaged);
    EXPECT_FALSE(fs::exists(file_of(store, key("1"))));
  }
  for (const size_t size : {size_t{0}, size_t{7}, size_t{91}, good.size() - 1}) {
    write_file_atomically(file_of(store, key("1")), good.substr(0, size));
    EXPECT_FALSE(store.load(key("1")).has_value()) << size;
  }
  write_file_atomically(file_of(store, key("1")), good + "x");
  EXPECT_FALSE(store.load(key("1")).has_value());
  const std::string warnings = testing::internal::GetCapturedStderr();
  EXPECT_NE(warnings.find("content does not match its SHA-256; it is compiled again"), std::string::npos) << warnings;
  // Another kernel's entry under this name is no answer either.
  store.save(key("2"), entry("two"));
  fs::copy_file(file_of(store, key("2")), file_of(store, key("1")));
  testing::internal::CaptureStderr();
  EXPECT_FALSE(store.load(key("1")).has_value());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("holds another kernel than its name says"), std::string::npos);
}

TEST(Store, StaysBoundedAndForgetsWhatWasUsedLongestAgo) {
  const TemporaryDirectory dir;
  const uint64_t each = encode(key("0"), entry("k0")).size();
  KernelStore earlier(dir.path(), 4 * each + 8), store(dir.path(), 4 * each + 8);
  for (int i = 0; i < 4; ++i) {
    const std::string name = fmt::format("k{}", i);
    earlier.save(key(std::to_string(i)), entry(name));
    // Distinct ages without waiting.
    fs::last_write_time(file_of(store, key(std::to_string(i))),
                        fs::file_time_type::clock::now() - std::chrono::minutes(10 - i));
  }
  ASSERT_TRUE(store.load(key("0")).has_value());  // the oldest file, but used just now
  store.save(key("4"), entry("k4"));
  EXPECT_LE(store.bytes(), 4 * each + 8);
  EXPECT_TRUE(fs::exists(file_of(store, key("0"))));
  EXPECT_FALSE(fs::exists(file_of(store, key("1"))));
  EXPECT_TRUE(fs::exists(file_of(store, key("4"))));
  EXPECT_EQ(store.counters().evicted, 1);
}

TEST(Store, KeepsWhatItWroteOrReadItselfWhateverTheLimit) {
  const TemporaryDirectory dir;
  const uint64_t each = encode(key("0"), entry("k0")).size();
  KernelStore earlier(dir.path());
  for (const char* name : {"0", "1", "2"}) earlier.save(key(name), entry(std::string("k") + name));
  KernelStore tiny(dir.path(), 1);
  ASSERT_TRUE(tiny.load(key("1")).has_value());
  tiny.save(key("5"), entry("k5"));
  tiny.save(key("6"), entry("k6"));
  std::vector<Key> kept = {key("1"), key("5"), key("6")};
  std::sort(kept.begin(), kept.end());
  EXPECT_EQ(tiny.keys(), kept);
  EXPECT_EQ(tiny.used_bytes(), 3 * each);
}

TEST(Store, PackThatTheLimitHasNoRoomForIsRefusedWhole) {
  const TemporaryDirectory from, to;
  KernelStore source(from.path());
  std::vector<Key> keys = {key("0"), key("1")};
  for (const Key& k : keys) source.save(k, entry("k"));
  source.write_pack(from.path() / "pack", keys);
  KernelStore small(to.path(), source.bytes() - 1);
  try {
    small.import_pack(from.path() / "pack");
    FAIL() << "wanted an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(source.bytes())), std::string::npos) << error.what();
  }
  EXPECT_TRUE(small.keys().empty());
  KernelStore enough(to.path(), source.bytes());
  EXPECT_EQ(enough.import_pack(from.path() / "pack"), 2u);
  EXPECT_EQ(enough.keys().size(), 2u);
}

TEST(Store, ForgottenTemporariesOfDeadProcessesGo) {
  const TemporaryDirectory dir;
  KernelStore store(dir.path());
  const fs::path stale = dir.path() / (key("9") + ".tmp-1-1"), fresh = dir.path() / (key("9") + ".tmp-2-1");
  std::ofstream(stale) << "half";
  std::ofstream(fresh) << "half";
  fs::last_write_time(stale, fs::file_time_type::clock::now() - std::chrono::hours(2));
  store.save(key("1"), entry("one"));
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(fresh)) << "another process may be writing it";
  EXPECT_EQ(store.keys().size(), 1u);
}

TEST(Store, ManyProcessesWriteAndReadTheSameEntries) {
  const TemporaryDirectory dir;
  constexpr int kProcesses = 6, kEntries = 8, kRounds = 20;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int bad = 0;
      try {
        KernelStore store(dir.path());
        for (int round = 0; round < kRounds; ++round) {
          for (int i = 0; i < kEntries; ++i) {
            const std::string name = fmt::format("k{}", (i + p) % kEntries);
            if (const auto e = store.load(key(name))) {
              bad += e->name != name;
            } else {
              store.save(key(name), entry(name));
            }
            if (round % 5 == p % 5) {
              std::error_code ignored;
              fs::remove(file_of(store, key(name)), ignored);  // eviction by somebody else
            }
          }
        }
        bad += store.counters().damaged != 0;
      } catch (const std::exception&) {
        bad = 100;
      }
      ::_exit(bad == 0 ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  for (const auto& file : fs::directory_iterator(dir.path())) {
    EXPECT_EQ(file.path().extension(), ".kernel") << "left over: " << file.path();
  }
}

TEST(Store, ThreadsOfOneProcessDoToo) {
  const TemporaryDirectory dir;
  KernelStore store(dir.path());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        store.save(key("same"), entry("same"));
        EXPECT_TRUE(store.load(key("same")).has_value());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.counters().damaged, 0);
  EXPECT_EQ(store.keys().size(), 1u);
}

TEST(Store, AFileInPlaceOfTheDirectoryIsAnError) {
  const TemporaryDirectory dir;
  std::ofstream(dir.path() / "file") << "x";
  EXPECT_THROW(KernelStore(dir.path() / "file"), Error);
  EXPECT_THROW(KernelStore(dir.path() / "file" / "below"), Error);
}

// ---- packs
// ------------------------------------------------------------------------------------------------------------------

TEST(Pack, MovesKernelsToAnotherStore) {
  const TemporaryDirectory a, b;
  KernelStore from(a.path()), to(b.path());
  std::vector<Key> keys;
  for (int i = 0; i < 5; ++i) {
    keys.push_back(key(std::to_string(i)));
    from.save(keys.back(), entry(fmt::format("k{}", i)));
  }
  keys.push_back(keys.front());  // named twice, packed once
  from.write_pack(a.path() / "pack", keys);
  EXPECT_EQ(to.import_pack(a.path() / "pack"), 5u);
  EXPECT_EQ(to.keys(), from.keys());
  EXPECT_EQ(to.load(keys[3])->name, "k3");
  EXPECT_EQ(to.import_pack(a.path() / "pack"), 5u) << "importing again changes nothing";
  EXPECT_EQ(to.keys().size(), 5u);
}

TEST(Pack, ADamagedPackStoresNothing) {
  const TemporaryDirectory a, b;
  KernelStore from(a.path()), to(b.path());
  from.save(key("1"), entry("one"));
  from.save(key("2"), entry("two"));
  from.write_pack(a.path() / "pack", from.keys());
  const std::string good = read_file(a.path() / "pack");
  for (size_t at = 0; at < good.size(); at += 17) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    write_file_atomically(a.path() / "bad", bad);
    EXPECT_THROW(to.import_pack(a.path() / "bad"), Error) << at;
  }
  for (const size_t size : {size_t{0}, size_t{47}, size_t{60}, good.size() / 2, good.size() - 1}) {
    write_file_atomically(a.path() / "bad", good.substr(0, size));
    EXPECT_THROW(to.import_pack(a.path() / "bad"), Error) << size;
  }
  // A wrong count under a right hash.
  std::string body = good.substr(0, good.size() - 32);
  body[8] = 3;
  const Digest digest = sha256(body);
  write_file_atomically(a.path() / "bad", body + std::string(digest.begin(), digest.end()));
  try {
    to.import_pack(a.path() / "bad");
    FAIL() << "a pack that ends early";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("ends inside entry 2 of 3"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(to.keys().empty());
  EXPECT_THROW(from.write_pack(a.path() / "pack", {key("missing")}), Error);
}

// ---- keys
// -------------------------------------------------------------------------------------------------------------------

CompileRequest request() {
  CompileRequest r;
  r.sources = {"main", "#include \"a.h\"\n\t#\t include\t\"b.h\"\nkernel", {}};
  r.sources.headers = {{"a.h", "#include \"c.h\"\n"}, {"b.h", "b"}, {"c.h", "#include \"a.h\""}, {"d.h", "unused"}};
  r.arch = "sm_90a";
  r.flags = {"-DX=1"};
  r.expressions = {"k<1>"};
  return r;
}

TEST(Keys, FollowEveryIncludeOnce) {
  EXPECT_EQ(reachable_headers(request().sources), (std::vector<std::string>{"a.h", "b.h", "c.h"}));
}

TEST(Keys, DependOnWhatDecidesTheCodeAndOnNothingElse) {
  const Key base = key_of(request(), "nvrtc 13.0");
  const auto changed = [&](auto change, const char* compiler = "nvrtc 13.0") {
    CompileRequest r = request();
    change(r);
    return key_of(r, compiler) != base;
  };
  EXPECT_TRUE(changed([](CompileRequest& r) { r.sources.text += " "; }));
  EXPECT_TRUE(changed([](CompileRequest& r) { r.sources.headers[2].second += " "; })) << "an indirect header";
  EXPECT_TRUE(changed([](CompileRequest& r) { r.arch = "sm_120a"; }));
  EXPECT_TRUE(changed([](CompileRequest& r) { r.flags = {"-DX=2"}; }));
  EXPECT_TRUE(changed([](CompileRequest& r) { r.flags.clear(); }));
  EXPECT_TRUE(changed([](CompileRequest& r) { r.expressions.push_back("k<2>"); }));
  EXPECT_TRUE(changed([](CompileRequest&) {}, "nvrtc 13.1"));
  // Not: the name in messages, headers that are not included, the order of the list.
  EXPECT_FALSE(changed([](CompileRequest& r) { r.sources.name = "other"; }));
  EXPECT_FALSE(changed([](CompileRequest& r) { r.sources.headers[3].second = "changed"; }));
  EXPECT_FALSE(changed([](CompileRequest& r) { std::swap(r.sources.headers[0], r.sources.headers[3]); }));
}

}  // namespace
}  // namespace fourfold::jit
