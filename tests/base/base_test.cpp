#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "base/console.h"
#include "base/env.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/random.h"
#include "base/shared_reads.h"
#include "base/temporary_directory.h"
#include "base/threads.h"

namespace fourfold {
namespace {

namespace fs = std::filesystem;

TEST(Console, WhoHasStoppedReadingEndsNothing) {
  const auto write = [](void (*handler)(int)) {
    int ends[2];
    if (::pipe(ends) != 0) std::_Exit(2);
    ::close(ends[0]);
    ::dup2(ends[1], STDERR_FILENO);
    ::signal(SIGPIPE, handler);
    eprint("nobody reads {}\n", "this");
    sigset_t waiting;
    ::sigpending(&waiting);
    std::_Exit(::sigismember(&waiting, SIGPIPE) == 0 ? 0 : 3);
  };
  EXPECT_EXIT(write(SIG_DFL), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(write(SIG_IGN), testing::ExitedWithCode(0), "");
}

// The handler runs on another thread, so that no call of this one returns early.
TEST(Interrupt, EndsAWaitForInput) {
  install_interrupt_handler();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::pthread_kill(::pthread_self(), SIGINT);
    for (int i = 0; i < 500 && interrupted(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(::write(ends[1], "x", 1), 1);  // ends a wait that has missed it
  });
  EXPECT_FALSE(wait_for_input(ends[0]));
  EXPECT_FALSE(wait_for_input(ends[0]));  // until it is cleared
  clear_interrupt();
  EXPECT_TRUE(wait_for_input(ends[0]));
  other.join();
  EXPECT_TRUE(wait_for_input(ends[0]));

  ::raise(SIGINT);  // before the wait, and before there is anything to read
  EXPECT_FALSE(wait_for_input(ends[0]));
  clear_interrupt();
  EXPECT_TRUE(wait_for_input(ends[0]));
  ::signal(SIGINT, SIG_DFL);
  ::close(ends[1]);
  ::close(ends[0]);
}

TEST(Math, CheckedArithmeticNamesTheThing) {
  EXPECT_EQ(checked_mul(1ull << 32, (1ull << 32) - 1, "size"), 0xffffffff00000000ull);
  EXPECT_EQ(checked_add(~0ull - 1, 1, "size"), ~0ull);
  EXPECT_THROW(checked_add(~0ull, 1, "size"), Error);
  try {
    checked_mul(1ull << 32, 1ull << 32, "tensor x");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tensor x"), std::string::npos);
  }
}

TEST(Check, PrintableEscapesAndCuts) {
  EXPECT_EQ(printable("a\nb"), "a\\x0ab");
  EXPECT_EQ(printable(std::string(100, 'x'), 4), "xxxx...");
  EXPECT_EQ(printable("Grüße, 世界 \xF0\x9F\x91\x8D\u00a0"), "Grüße, 世界 \xF0\x9F\x91\x8D\u00a0");
  // Cut characters, stray and overlong bytes, a surrogate, beyond U+10FFFF, and the control character U+0085.
  EXPECT_EQ(printable("\xc3"), "\\xc3");
  EXPECT_EQ(printable("\x80z"), "\\x80z");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xc2\x85"), "\\xc2\\x85");
}

TEST(File, NothingButAFileIsReplaced) {
  const TemporaryDirectory directory;
  const std::filesystem::path pipe = directory / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(write_file_atomically(pipe, "x"), Error);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_THROW(write_file_atomically(directory.path(), "x"), Error);
}

TEST(File, NamesThatCannotBeLookedUpDoNotExist) {
  EXPECT_FALSE(directory_exists(std::string(5000, 'x')));
  EXPECT_FALSE(file_exists(std::string(300, 'x')));
  EXPECT_TRUE(directory_exists("/"));
  EXPECT_FALSE(file_exists("/"));
}

TEST(Threads, EveryIndexOnceForAnyGrainAndSize) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.size(), threads);
    for (int64_t n : {0, 1, 5, 1000}) {
      for (int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
        pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          ASSERT_LE(end - begin, grain);
          for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)]++;
        });
        for (auto& hit : hits) EXPECT_EQ(hit, 1);
      }
    }
  }
}

TEST(Threads, RangesCoverEveryIndexOnce) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 5, 1000}) {
      for (int64_t grain : {1, 64}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
        const auto count = [&](int thread, int64_t begin, int64_t end) {
          ASSERT_TRUE(thread >= 0 && thread < threads && end - begin <= grain);
          for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)]++;
        };
        pool.parallel_ranges(n, grain, count);
        for (auto& hit : hits) EXPECT_EQ(hit.exchange(0), 1);
        pool.parallel_ranges(
            n, grain, [&](int t) { return t == 0 ? 0 : n; }, count);  // the others only take away
        for (auto& hit : hits) EXPECT_EQ(hit, 1);
      }
    }
  }
}

// More threads than processors and regions that are over before most threads begin.
TEST(Threads, RegionsWithoutThoseThatComeLate) {
  ThreadPool pool(9);
  for (int64_t round = 0; round < 2000; ++round) {
    int64_t local = round;  // a late thread that still ran would see another region's
    std::atomic<int64_t> sum{0};
    std::atomic<int64_t> next{0};
    pool.share([&](int) {
      while (next.fetch_add(1) < 20) sum += local;
    });
    ASSERT_EQ(sum, 20 * round);
  }
  std::atomic<int> count{0};
  pool.run([&](int) { count++; });
  EXPECT_EQ(count, 9);
}

TEST(Threads, ExceptionReachesTheCallerAndThePoolSurvives) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(pool.run([](int thread) {
      if (thread == 1) fail("thread {} fails", thread);
    }),
                 Error);
    std::atomic<int> count{0};
    pool.run([&](int) { count++; });
    EXPECT_EQ(count, 3);
  }
}

TEST(Threads, SleepingWorkersWakeUp) {
  ThreadPool pool(2);
  for (int round = 0; round < 3; ++round) {
    ::usleep(30000);  // longer than the spin, so that the worker sleeps
    std::atomic<int> count{0};
    pool.run([&](int) { count++; });
    EXPECT_EQ(count, 2);
  }
}

TEST(Threads, LittleProcessorsAreLeftOut) {
  const TemporaryDirectory directory;
  const fs::path& root = directory.path();
  const auto add = [&](int processor, const char* capacity) {
    const fs::path folder = root / fmt::format("sys/devices/system/cpu/cpu{}", processor);
    fs::create_directories(folder);
    if (*capacity != 0) std::ofstream(folder / "cpu_capacity") << capacity << "\n";
  };
  add(0, "446");
  add(1, "512");
  add(2, "1024");
  add(5, "");  // as on x86
  const auto helpful = [&](std::vector<int> processors) { return helpful_processors(processors, root.string() + "/"); };
  EXPECT_EQ(helpful({0, 1, 2, 5}), (std::vector<int>{1, 2, 5}));
  EXPECT_EQ(helpful({0, 1}), (std::vector<int>{0, 1}));
  EXPECT_EQ(helpful({5, 9}), (std::vector<int>{5, 9}));
}

TEST(File, MapReadWrite) {
  const TemporaryDirectory temporary;
  const std::filesystem::path& directory = temporary.path();
  const auto path = directory / "file";
  write_file_atomically(path, "hello");
  EXPECT_EQ(read_file(path), "hello");
  EXPECT_THROW(read_file(path, 4), Error);
  MappedFile file(path);
  EXPECT_EQ(file.bytes().size(), 5u);
  MappedFile moved = std::move(file);
  EXPECT_EQ(static_cast<char>(moved.bytes()[4]), 'o');
  write_file_atomically(path, "");
  EXPECT_TRUE(MappedFile(path).bytes().empty());
  EXPECT_THROW(MappedFile{directory}, Error);
  EXPECT_THROW(MappedFile(directory / "missing"), Error);
  EXPECT_THROW(write_file_atomically(directory / "no" / "such", "x"), Error);
  int left = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++left;
  EXPECT_EQ(left, 1) << "temporary files left behind";
}

// Threads that want a part each of the same rows, in different orders; more than may be kept.
TEST(SharedReads, EveryTakerHasItsBytesAndFewAreReadTwice) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "file";
  constexpr uint64_t kSpan = 1000, kSpans = 400;
  std::string bytes(kSpan * kSpans, ' ');
  Random random(3);
  for (char& byte : bytes) byte = static_cast<char>(random.next());
  std::ofstream(path, std::ios::binary) << bytes;
  const auto file = std::make_shared<const OpenFile>(path);
  for (const uint64_t most : {uint64_t{1} << 20, 5 * kSpan, uint64_t{0}}) {
    SharedReads reads(most, std::chrono::milliseconds(1));
    std::atomic<int> wrong{0};
    std::vector<std::thread> takers;
    for (int taker = 0; taker < 4; ++taker) {
      takers.emplace_back([&, taker] {
        for (uint64_t i = 0; i < kSpans; ++i) {
          const uint64_t span = i ^ static_cast<uint64_t>(taker);  // neighbours in another order
          const SharedReads::Bytes got = reads.take(file, span * kSpan, kSpan, 4);
          if (std::memcmp(got->data(), bytes.data() + span * kSpan, kSpan) != 0) ++wrong;
        }
      });
    }
    for (std::thread& taker : takers) taker.join();
    EXPECT_EQ(wrong, 0);
    if (most > kSpan * kSpans) {
      EXPECT_EQ(reads.reads(), kSpans);
    } else if (most == 0) {
      EXPECT_EQ(reads.reads(), 4 * kSpans);
    } else {
      EXPECT_GE(reads.reads(), kSpans);
    }
    // What was taken by all is forgotten: it is read again.
    const int64_t before = reads.reads();
    reads.take(file, 0, kSpan, 1);
    EXPECT_EQ(reads.reads(), before + 1);
  }
}

// A taker that will never come is not waited for once that is known.
TEST(SharedReads, NobodyWaitsForWhoHasFailed) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "file";
  std::ofstream(path, std::ios::binary) << std::string(3000, 'x');
  const auto file = std::make_shared<const OpenFile>(path);
  SharedReads reads(1000, std::chrono::minutes(10));
  reads.take(file, 0, 1000, 2);  // kept for another one
  std::thread waits([&] { EXPECT_EQ(reads.take(file, 1000, 1000, 2)->at(0), 'x'); });
  reads.stop();
  waits.join();
  EXPECT_EQ(reads.take(file, 2000, 1000, 2)->at(0), 'x');
  EXPECT_EQ(reads.take(file, 0, 1000, 2)->at(0), 'x');  // what is there is still found
  EXPECT_EQ(reads.reads(), 3);
}

TEST(SharedReads, AFileThatEndsEarlyIsAnErrorForAll) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "file";
  std::ofstream(path, std::ios::binary) << std::string(100, 'x');
  const auto file = std::make_shared<const OpenFile>(path);
  SharedReads reads;
  for (int taker = 0; taker < 3; ++taker) EXPECT_THROW(reads.take(file, 50, 100, 3), Error);
  EXPECT_EQ(reads.reads(), 1);
  EXPECT_EQ(reads.take(file, 50, 50, 3)->at(0), 'x');
}

TEST(File, WhatIsNotCommittedLeavesNothing) {
  const TemporaryDirectory directory;
  {
    AtomicFile file(directory / "file");
    file.write("half of it");
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Checksum, TellsLengthsAndBytesApart) {
  std::set<uint64_t> seen;
  std::vector<std::byte> bytes(100);
  for (size_t count = 0; count <= bytes.size(); ++count) {
    EXPECT_TRUE(seen.insert(checksum(std::span(bytes).first(count))).second) << count << " zeros";
  }
  for (std::byte& byte : bytes) {
    byte = std::byte{1};
    EXPECT_TRUE(seen.insert(checksum(bytes)).second) << &byte - bytes.data();
    byte = std::byte{0};
  }
}

TEST(Threads, TheirNumberIsCheckedAndTaken) {
  const char* before = std::getenv("FOURFOLD_THREADS");
  const std::string kept = before == nullptr ? "" : before;
  for (const char* wrong : {"0", "-1", "1025", "two", "3x", "99999999999999999999"}) {
    ::setenv("FOURFOLD_THREADS", wrong, 1);
    EXPECT_THROW(ThreadPool::default_threads(), Error) << wrong;
  }
  for (const int right : {1, 3, 1024}) {
    ::setenv("FOURFOLD_THREADS", std::to_string(right).c_str(), 1);
    EXPECT_EQ(ThreadPool::default_threads(), right);
  }
  ::setenv("FOURFOLD_THREADS", kept.c_str(), 1);  // empty counts as absent
}

TEST(Random, IsTheSameEverywhereAndUniform) {
  Random random(1);
  EXPECT_EQ(random.next(), 0x910a2dec89025cc1ull);
  std::vector<int> counts(10);
  for (int i = 0; i < 100000; ++i) counts[random.below(10)]++;
  for (int count : counts) EXPECT_NEAR(count, 10000, 500);
  double sum = 0, squares = 0;
  for (int i = 0; i < 100000; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 1e5, 0.0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1.0, 0.02);
}

TEST(Env, OnlyVariablesOfTheTable) { EXPECT_THROW(env("FOURFOLD_NO_SUCH_VARIABLE"), std::logic_error); }

}  // namespace
}  // namespace fourfold
