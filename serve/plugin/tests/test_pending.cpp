// GPU times of a collective: whole when every channel was reported, else none, whatever comes late,
// twice or never.
#include <mutex>
#include <thread>
#include <vector>

#include "profiler/pending.h"
#include "profiler/recorder.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

std::mutex g_mutex;
std::vector<CallRecord> g_records;

void keep(void*, const CallRecord& record) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_records.push_back(record);
}

/// What was pushed meanwhile: the last communicator's end flushes it all.
std::vector<CallRecord> taken() {
  Recorder::release();
  Recorder::acquire();
  const std::lock_guard<std::mutex> lock(g_mutex);
  std::vector<CallRecord> records;
  records.swap(g_records);
  return records;
}

CallRecord record_of(std::uint64_t sequence, int channels) {
  CallRecord record = {};
  record.sequence = sequence;
  record.num_channels = static_cast<std::uint8_t>(channels);
  return record;
}

void channel(Pending* pending, Pending::Ticket ticket, int number, std::uint64_t start,
             std::uint64_t stop) {
  pending->channel_begin(ticket, number, start);
  pending->channel_stamp(ticket, number, stop);
  pending->channel_end(ticket, number);
}

bool has_times(const CallRecord& record, std::uint64_t start, std::uint64_t stop) {
  return record.start_ns == start && record.stop_ns == stop && record.flags == 0;
}

bool has_none(const CallRecord& record) {
  return record.start_ns == 0 && record.stop_ns == 0 && record.flags == kFlagIncomplete;
}

void any_order(Pending* pending) {
  Pending::Ticket first, second;
  CHECK(pending->begin(record_of(1, 2), &first));
  CHECK(pending->begin(record_of(2, 1), &second));
  channel(pending, first, 63, 110, 190);
  pending->end(first);
  CHECK(taken().empty());
  channel(pending, second, 5, 300, 400);
  CHECK(taken().empty());
  pending->end(second);  // the collective's own end can be the last
  channel(pending, first, 0, 100, 170);
  const std::vector<CallRecord> records = taken();
  CHECK(records.size() == 2);
  CHECK(records[0].sequence == 2 && has_times(records[0], 300, 400));
  CHECK(records[1].sequence == 1 && has_times(records[1], 100, 190));
}

void twice_and_too_many(Pending* pending) {
  Pending::Ticket ticket;
  CHECK(pending->begin(record_of(1, 2), &ticket));
  channel(pending, ticket, 1, 100, 200);
  channel(pending, ticket, 1, 100, 200);
  pending->end(ticket);
  pending->end(ticket);
  CHECK(taken().empty());
  channel(pending, ticket, 2, 90, 150);
  channel(pending, ticket, 3, 1, 999);  // of nobody by now
  pending->end(ticket);
  const std::vector<CallRecord> records = taken();
  CHECK(records.size() == 1 && has_times(records[0], 90, 200));
  // One channel more than was said, before the end.
  CHECK(pending->begin(record_of(2, 1), &ticket));
  channel(pending, ticket, 1, 100, 200);
  channel(pending, ticket, 2, 100, 200);
  pending->end(ticket);
  const std::vector<CallRecord> odd = taken();
  CHECK(odd.size() == 1 && has_none(odd[0]));
}

void lost_stamp(Pending* pending) {
  Pending::Ticket ticket;
  CHECK(pending->begin(record_of(1, 1), &ticket));
  pending->channel_begin(ticket, 0, 100);
  pending->channel_end(ticket, 0);
  pending->end(ticket);
  CHECK(pending->begin(record_of(2, 1), &ticket));
  channel(pending, ticket, 0, 200, 200);  // a clock that stood still
  pending->end(ticket);
  const std::vector<CallRecord> records = taken();
  CHECK(records.size() == 2 && has_none(records[0]) && has_none(records[1]));
}

void oldest_gives_way(Pending* pending) {
  Pending::Ticket tickets[Pending::kSlots + 1];
  for (int i = 0; i <= Pending::kSlots; ++i) {
    CHECK(pending->begin(record_of(static_cast<std::uint64_t>(i), 1), &tickets[i]));
    pending->end(tickets[i]);
  }
  std::vector<CallRecord> records = taken();
  CHECK(records.size() == 1 && records[0].sequence == 0 && has_none(records[0]));
  // Its late channel must not count for the one that has its slot now.
  CHECK(tickets[0].slot == tickets[Pending::kSlots].slot);
  channel(pending, tickets[0], 0, 1, 2);
  CHECK(taken().empty());
  channel(pending, tickets[Pending::kSlots], 0, 100, 200);
  records = taken();
  CHECK(records.size() == 1 && records[0].sequence == Pending::kSlots &&
        has_times(records[0], 100, 200));
  pending->flush();
  records = taken();
  CHECK(records.size() == Pending::kSlots - 1);
  for (const CallRecord& record : records) CHECK(has_none(record));
  channel(pending, tickets[5], 0, 1, 2);  // after the flush
  pending->flush();
  CHECK(taken().empty());
}

/// Two threads report, one recycles: each record comes once, and times are right or none.
void races(Pending* pending) {
  constexpr std::uint64_t kCalls = 4000;
  for (std::uint64_t call = 1; call <= kCalls; call += 8) {
    std::vector<Pending::Ticket> tickets(8);
    for (std::uint64_t i = 0; i < 8; ++i) {
      CHECK(pending->begin(record_of(call + i, 2), &tickets[i]));
    }
    const auto report = [&](int number) {
      for (std::uint64_t i = 0; i < 8; ++i) {
        const std::uint64_t start = 1000 * (call + i);
        channel(pending, tickets[i], number, start, start + 10);
        if (number == 0) pending->end(tickets[i]);
      }
    };
    std::thread proxy(report, 1);
    report(0);
    if (call % 64 == 1) pending->flush();
    proxy.join();
  }
  pending->flush();
  const std::vector<CallRecord> records = taken();
  CHECK(records.size() == kCalls);
  std::vector<int> seen(kCalls + 1);
  for (const CallRecord& record : records) {
    ++seen[record.sequence];
    const std::uint64_t start = 1000 * record.sequence;
    CHECK(has_times(record, start, start + 10) || has_none(record));
  }
  for (std::uint64_t call = 1; call <= kCalls; ++call) CHECK(seen[call] == 1);
}

}  // namespace

int main() {
  Recorder::set_sink(keep, nullptr);
  CHECK(!Recorder::is_on());
  Recorder::acquire();
  CHECK(Recorder::is_on());
  static Pending slots;  // never freed, as in a Profiler
  Pending* const pending = &slots;
  CHECK(pending->allocate());
  any_order(pending);
  twice_and_too_many(pending);
  lost_stamp(pending);
  oldest_gives_way(pending);
  races(pending);
  Recorder::release();
  Recorder::set_sink(nullptr, nullptr);
  Recorder::acquire();
  CHECK(!Recorder::is_on());  // nobody wants them
  Recorder::release();
  return g_failures;
}
