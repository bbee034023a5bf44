#include "distributed/group.h"

#include "build.h"
#include "core/clock.h"
#include "core/hash.h"
#include "core/platform.h"
#include "core/problem.h"
#include "distributed/start.h"

#ifndef HEADLOOM_GLOO

namespace headloom {

void check_can_distribute() {
  usage_error(
      "training on several processes needs a PyTorch with gloo, which this Headloom was built "
      "without.");
}

std::unique_ptr<Group> Group::connect(const Place&, const GroupOptions&) {
  check_can_distribute();
  return nullptr;
}

int start_ranks(int64_t, const std::vector<std::string>&, const std::function<bool()>&) {
  check_can_distribute();
  return 2;
}

}  // namespace headloom

#else

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/version.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <thread>
#define USE_C10D_GLOO  // without it the header of ProcessGroupGloo is empty
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "distributed/meeting.h"

namespace headloom {

void check_can_distribute() {}

namespace {

using std::chrono::milliseconds;

// What each process says of itself before they connect.
class Greeting {
  template <typename Self>
  static auto lines(Self& self) {
    return std::array{&self.host,  &self.machine,       &self.group,   &self.process, &self.version,
                      &self.torch, &self.configuration, &self.threads, &self.products};
  }

 public:
  std::string host, machine, group, process, version, torch, configuration, threads, products;

  // Hosts that are copies of one machine may have one name.
  bool is_beside(const Greeting& other) const {
    return host == other.host && machine == other.machine;
  }
  std::string text() const {
    std::string out;
    for (const std::string* line : lines(*this)) out += *line + "\n";
    return out;
  }
  static Greeting read(const std::string& text) {
    std::istringstream stream(text);
    Greeting out;
    for (std::string* line : lines(out)) std::getline(stream, *line);
    return out;
  }
};

// Throws where two processes differ in what must be equal.
void compare(const std::vector<Greeting>& all) {
  struct Part {
    const char* what;
    std::string Greeting::* member;
    const char* advice;
  };
  const std::array parts = {
      Part{"Headloom ", &Greeting::version, "; install the same one everywhere."},
      Part{"PyTorch ", &Greeting::torch, "; install the same one everywhere."},
      Part{"the configuration and options with the hash ", &Greeting::configuration,
           "; start all ranks with the same command and files."},
      Part{"the number of threads ", &Greeting::threads, "; set OMP_NUM_THREADS alike."},
      Part{"the variable HEADLOOM_PRODUCTS as ", &Greeting::products, "; set it alike."}};
  for (const Part& part : parts) {
    for (size_t i = 1; i < all.size(); ++i) {
      const std::string &here = all[i].*part.member, &first = all[0].*part.member;
      if (here == first) continue;
      usage_error("rank ", i, " on host ", all[i].host, " has ", part.what, here,
                  ", but rank 0 on host ", all[0].host, " has ", first, part.advice);
    }
  }
}

std::string names_of_interfaces() {
  std::string out;
  struct ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return out;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    const std::string name = i->ifa_name;
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    out += (out.empty() ? "" : ", ") + name;
  }
  ::freeifaddrs(first);
  return out;
}

bool is_loopback(const std::string& interface) {
  bool out = false;
  struct ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return out;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_name == interface) out = (i->ifa_flags & IFF_LOOPBACK) != 0;
  }
  ::freeifaddrs(first);
  return out;
}

// The address of this machine by which it reaches `host`, as a number; "" where it does not.
std::string own_address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string out;
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_in own{};
  socklen_t length = sizeof own;
  std::array<char, INET_ADDRSTRLEN> text{};
  // Nothing is sent: the system only chooses a route.
  if (fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
      ::inet_ntop(AF_INET, &own.sin_addr, text.data(), text.size()) != nullptr) {
    out = text.data();
  }
  if (fd >= 0) ::close(fd);
  ::freeaddrinfo(found);
  return out;
}

// What c10d throws while it talks to the others, as LostRank. `what` says what did not succeed.
constexpr const char* kBroken =
    "the connection between the ranks broke, though all of them are there";
template <typename F>
auto talking(const F& f, const char* what = kBroken) {
  try {
    return f();
  } catch (const std::exception& error) {
    const std::string said = error.what();
    throw LostRank(str(what, " (gloo: ", said.substr(0, said.find('\n')), ")."));
  }
}

using Gloo = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

// What processes exchange by gloo, as the Communicator `Base`.
template <typename Base>
class OverGloo : public Base {
 public:
  double waited() const override { return waited_; }

  void sum(const std::vector<at::Tensor>& tensors) override {
    std::vector<std::function<void()>> waits;
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor flat = tensor.is_contiguous() ? tensor : tensor.contiguous();
      waits.push_back(start_sum(flat));
      if (flat.is_same(tensor)) continue;
      waits.back()();
      tensor.copy_(flat);
      waits.pop_back();
    }
    for (const auto& wait : waits) wait();
  }

  std::function<void()> start_sum(const at::Tensor& tensor) override {
    std::vector<at::Tensor> own = {tensor.detach()};
    const auto work = talking([&] { return gloo_->allreduce(own); });
    return [this, work] { wait(*work); };
  }

  void broadcast(const std::vector<at::Tensor>& tensors) override {
    for (const at::Tensor& tensor : tensors) {
      std::vector<at::Tensor> own = {tensor.detach()};
      wait(*talking([&] { return gloo_->broadcast(own); }));
    }
  }

  std::function<void()> start_gather(const at::Tensor& own, const at::Tensor& all) override {
    if (!gathering_) gathering_ = new_gloo("gather");
    at::Tensor given = own.detach(), taken = all.detach();
    const auto work = talking([&] { return gathering_->_allgather_base(taken, given); });
    return [this, work] { wait(*work); };
  }

  std::function<void()> start_shift(const at::Tensor& own, const at::Tensor& other) override {
    const auto all = static_cast<int>(this->size()), rank = static_cast<int>(this->rank());
    std::vector<at::Tensor> given = {own.detach()}, taken = {other.detach()};
    // Numbers, so that what is sent later is not taken for what is sent now.
    shifts_ = (shifts_ + 1) % (1 << 20);
    const auto sends = talking([&] { return gloo_->send(given, (rank + 1) % all, shifts_); });
    const auto takes = talking([&] { return gloo_->recv(taken, (rank + all - 1) % all, shifts_); });
    return [this, sends, takes] {
      wait(*takes);
      wait(*sends);
    };
  }

  std::vector<at::Tensor> gather(const at::Tensor& tensor) override {
    std::vector<at::Tensor> own = {tensor};
    std::vector<std::vector<at::Tensor>> all(1);
    for (int64_t i = 0; i < this->size(); ++i) all[0].push_back(at::empty_like(tensor));
    wait(*talking([&] { return gloo_->allgather(all, own); }));
    return all[0];
  }

 protected:
  // Connections of their own, on which the order of calls is that of this name alone.
  virtual Gloo new_gloo(const std::string& name) const = 0;

  Gloo gloo_, gathering_;  // the second from its first use

 private:
  void wait(c10d::Work& work) {
    const double start = seconds_now();
    talking([&] { return work.wait(); });
    waited_ += seconds_now() - start;
  }

  double waited_ = 0;
  int shifts_ = 0;
};

// Some of a group's processes.
class GlooPart final : public OverGloo<Communicator> {
 public:
  // `connect` makes the connections of a name.
  GlooPart(int64_t rank, int64_t size, std::string name,
           std::function<Gloo(const std::string&, int64_t rank, int64_t size)> connect)
      : rank_(rank), size_(size), name_(std::move(name)), connect_(std::move(connect)) {
    gloo_ = new_gloo("gloo");
  }
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }

 private:
  Gloo new_gloo(const std::string& name) const override {
    return connect_(name_ + "/" + name, rank_, size_);
  }

  const int64_t rank_, size_;
  const std::string name_;
  const std::function<Gloo(const std::string&, int64_t, int64_t)> connect_;
};

class GlooGroup final : public OverGloo<Group> {
 public:
  GlooGroup(const Place& place, const GroupOptions& options) : place_(place), options_(options) {
    store_ = open_store(place, milliseconds(static_cast<int64_t>(1000 * options.timeout)));
    watched_ = store_->clone();
    watcher_ = std::thread([this] { watch(); });
  }

  ~GlooGroup() override { stop_watching(); }

  int64_t rank() const override { return place_.rank; }
  int64_t size() const override { return place_.size; }
  int64_t on_this_machine() const override {
    return count([](const Greeting& own, const Greeting& one) { return one.is_beside(own); });
  }
  int64_t in_this_control_group() const override {
    return count([](const Greeting& own, const Greeting& one) {
      return one.is_beside(own) && one.group == own.group;
    });
  }
  double waited() const override {
    double sum = OverGloo::waited();
    for (const auto& part : parts_) sum += part->waited();
    return sum;
  }

  Communicator& part(const std::string& name, const std::vector<int64_t>& ranks) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
    parts_.push_back(std::make_unique<GlooPart>(
        own, static_cast<int64_t>(ranks.size()), str(name, "/", ranks.front()),
        [this](const std::string& of, int64_t of_rank, int64_t of_size) {
          return connect(of, of_rank, of_size);
        }));
    return *parts_.back();
  }

  void meet(const std::string& configuration) override {
    const char* const products = std::getenv("HEADLOOM_PRODUCTS");
    const Greeting own{.host = host_name(),
                       .machine = boot_id(),
                       .group = hash_text(control_groups()),
                       .process = std::to_string(::getpid()),
                       .version = HEADLOOM_VERSION,
                       .torch = TORCH_VERSION,
                       .configuration = hash_text(configuration),
                       .threads = std::to_string(at::get_num_threads()),
                       .products = str('"', products == nullptr ? "" : products, '"')};
    set(key("greeting", rank()), own.text());
    expect_all("greeting");
    for (int64_t i = 0; i < size(); ++i) {
      greetings_.push_back(Greeting::read(get(key("greeting", i))));
    }
    compare(greetings_);
    gloo_ = new_gloo("gloo");
    const at::Tensor count = at::full({2}, rank() + 1, at::kLong);
    sum({count});
    const int64_t expected = size() * (size() + 1) / 2;
    if (count[0].item<int64_t>() != expected || count[1].item<int64_t>() != expected) {
      fail("the ranks do not understand each other: the sum of their numbers is ",
           count[0].item<int64_t>(), ", expected ", expected, ".");
    }
  }

  int run(const std::function<int()>& body) override {
    try {
      const int code = body();
      finish();
      return code;
    } catch (const LostRank& lost) {
      end_after_loss(lost.what());
    } catch (const UsageError& error) {
      end(error.what(), 2);
    } catch (const std::exception& error) {
      end(problem_of(error), 1);
    }
  }

 private:
  static std::string key(const char* what, int64_t rank) { return str(what, "/", rank); }
  void set(const std::string& name, const std::string& text) { store_->set(name, text); }
  std::string get(const std::string& name) { return get(store_, name); }
  static std::string get(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name) {
    const std::vector<uint8_t> bytes = store->get(name);
    return {bytes.begin(), bytes.end()};
  }
  bool is_set(const std::string& name) { return store_->check({name}); }

  std::vector<int64_t> without(const char* what) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < size(); ++i) {
      if (!is_set(key(what, i))) out.push_back(i);
    }
    return out;
  }

  // "rank 1 on host a (process 12) and rank 2 on host b (process 7)".
  std::string named(const std::vector<int64_t>& ranks) const {
    std::string out;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
      out += str("rank ", ranks[i]);
      const auto at = static_cast<size_t>(ranks[i]);
      if (at >= greetings_.size()) continue;
      out += str(" on host ", greetings_[at].host, " (process ", greetings_[at].process, ")");
    }
    return out;
  }

  // Waits until every rank has set its key.
  void expect_all(const char* what) {
    const double start = seconds_now();
    for (std::vector<int64_t> left; !(left = without(what)).empty();) {
      if (is_set("cause")) throw LostRank("another rank has failed.");
      if (seconds_now() - start > options_.timeout) {
        fail(named(left), left.size() > 1 ? " have" : " has", " not come within ", options_.timeout,
             " seconds; are all ranks started?");
      }
      std::this_thread::sleep_for(milliseconds(20));
    }
  }

  Gloo new_gloo(const std::string& name) const override { return connect(name, rank(), size()); }

  Gloo connect(const std::string& name, int64_t of_rank, int64_t of_size) const {
    auto options = c10d::ProcessGroupGloo::Options::create(
        milliseconds(static_cast<int64_t>(1000 * options_.timeout)));
    options->devices.push_back(device());
    return talking(
        [&] {
          return c10::make_intrusive<c10d::ProcessGroupGloo>(
              c10::make_intrusive<c10d::PrefixStore>(name, store_), static_cast<int>(of_rank),
              static_cast<int>(of_size), options);
        },
        together() ? "the ranks cannot connect to each other"
                   : "the ranks cannot connect to each other, though all of them have met; each "
                     "listens on a port that the system chooses, so that all ports must be open "
                     "between their hosts");
  }

  // The ranks of which `belongs` is true beside this one.
  template <typename F>
  int64_t count(const F& belongs) const {
    const Greeting& own = greetings_[static_cast<size_t>(rank())];
    return std::count_if(greetings_.begin(), greetings_.end(),
                         [&](const Greeting& one) { return belongs(own, one); });
  }

  bool together() const {
    return std::all_of(greetings_.begin(), greetings_.end(),
                       [&](const Greeting& one) { return one.is_beside(greetings_[0]); });
  }

  auto device() const -> decltype(c10d::ProcessGroupGloo::createDeviceForHostname("")) {
    if (!options_.interface.empty()) {
      if (::if_nametoindex(options_.interface.c_str()) == 0) {
        usage_error("--interface ", options_.interface, ": there is no such network on host ",
                    host_name(), ", expected one of ", names_of_interfaces(), ".");
      }
      if (!together() && is_loopback(options_.interface)) {
        usage_error("--interface ", options_.interface,
                    ": other hosts do not reach this network of host ", host_name(),
                    ", expected one of ", names_of_interfaces(), ".");
      }
      return c10d::ProcessGroupGloo::createDeviceForInterface(options_.interface);
    }
    if (together()) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
    const std::string own = own_address_towards(place_.address);
    if (own.empty() || own.starts_with("127.")) {
      usage_error("host ", host_name(), " reaches ", place_.address, " by the address ",
                  own.empty() ? "(none)" : own,
                  ", which other hosts do not reach; name the network with --interface, one of ",
                  names_of_interfaces(), ".");
    }
    return c10d::ProcessGroupGloo::createDeviceForHostname(own);
  }

  // A thread of its own answers for this process while it computes, and ends it where it waits for
  // those that are gone.
  void watch() {
    bool answered = false;
    while (!finished_within(milliseconds(300))) {
      int code = 1;
      try {
        if (!answered && watched_->check({"roll call"})) {
          answered = true;
          watched_->set(key("present", rank()), std::string("1"));
        }
        if (!watched_->check({"cause"})) continue;
        if (finished_within(std::chrono::seconds(5))) return;
        code = code_of_the_cause(watched_);
      } catch (const std::exception&) {
        if (finished_within(std::chrono::seconds(5))) return;
        // The main thread is about to say why, and has a thread that ends the process if it cannot.
        if (ending_.exchange(true)) return;
        say_once(store_is_gone());
      }
      std::_Exit(code);
    }
  }

  // Whether the main thread is done with the others now or within `time`.
  bool finished_within(milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return woken_.wait_for(lock, time, [this] { return finished_; });
  }

  void stop_watching() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      finished_ = true;
    }
    woken_.notify_all();
    if (watcher_.joinable()) watcher_.join();
  }

  // All are done: nobody leaves before, so that no connection ends under another's last words.
  void finish() {
    set(key("done", rank()), "1");
    expect_all("done");
    stop_watching();
    parts_.clear();
    gathering_.reset();
    gloo_.reset();
    set(key("left", rank()), "1");
    if (rank() == 0 && !place_.served) {
      const double start = seconds_now();
      while (!without("left").empty() && seconds_now() - start < 5) {
        std::this_thread::sleep_for(milliseconds(20));
      }
    }
  }

  // `broken`: what to say where all the others are still there.
  [[noreturn]] void end_after_loss(const std::string& broken) {
    ending_ = true;
    leave_at_the_latest(store_is_gone());
    const double start = seconds_now();
    const auto passed = [&] { return seconds_now() - start; };
    try {
      set(key("lost", rank()), "1");
      set("roll call", "1");
      // Who has failed may be about to say so.
      while (passed() < 4 && !is_set("cause")) std::this_thread::sleep_for(milliseconds(50));
      if (!is_set("cause")) {
        const std::vector<int64_t> gone = without("present"), busy = without("lost");
        const std::string which =
            !gone.empty()   ? named(gone) + " no longer answers: it was killed, or it hangs."
            : !busy.empty() ? str(named(busy), " has not come to the others within ",
                                  options_.timeout, " seconds (--timeout).")
                            : broken;
        end(which + " All ranks end; go on from the last checkpoint with --resume.", 1,
            /*own=*/false);
      }
      leave(code_of_the_cause(store_));
    } catch (const std::exception&) {
      say_once(store_is_gone());
    }
    leave(1);
  }

  // What a rank ends with where another has said "cause": all end alike, because the launcher
  // passes on the exit code of whichever ends first. A launcher that says a cause gives no code.
  static int code_of_the_cause(const c10::intrusive_ptr<c10d::Store>& store) {
    return store->check({"exit code"}) ? std::stoi(get(store, "exit code")) : 1;
  }

  // With it rank 0 or the launcher. Nobody can be asked who has failed, so every rank says this.
  std::string store_is_gone() const {
    return str("rank ", rank(), " on host ", host_name(), " has lost ",
               place_.served ? "the launcher" : "rank 0",
               ", which was killed or has ended; go on from the last checkpoint with --resume.");
  }

  // Ends this process with `why`, unless something was said, where the store does not answer: a
  // host that is cut off from the network does not even refuse.
  void leave_at_the_latest(const std::string& why) {
    std::thread([this, why] {
      std::this_thread::sleep_for(std::chrono::seconds(12));
      say_once(why);
      std::_Exit(1);
    }).detach();
  }

  // Ends this process after a failure. The first of all processes says why. `own`: it is this
  // rank's.
  [[noreturn]] void end(const std::string& why, int code, bool own = true) {
    ending_ = true;
    const bool named = !own || why.starts_with("rank ");
    const std::string text =
        named ? why : str("rank ", rank(), " on host ", host_name(), ": ", why);
    leave_at_the_latest(text);
    bool first = true;
    try {
      first = store_->add("failures", 1) == 1;
      if (first) {
        set("exit code", std::to_string(code));
        set("cause", text);
      }
    } catch (const std::exception&) {  // then the launcher, or rank 0, is gone as well
    }
    if (first) say_once(text);
    leave(code);
  }

  void say_once(const std::string& text) {
    // Whoever comes second waits for the first, because it may end this process right after.
    const std::lock_guard lock(saying_);
    if (said_) return;
    said_ = true;
    const bool open = !text.empty() && std::string_view(".?!").find(text.back()) == text.npos;
    std::fprintf(stderr, "headloom: %s%s\n", text.c_str(), open ? "." : "");
  }

  // Without destructors: they would wait for connections on which nobody answers.
  [[noreturn]] void leave(int code) {
    std::fflush(nullptr);
    try {
      set(key("left", rank()), "1");
      const double start = seconds_now();
      while (rank() == 0 && !place_.served && !without("left").empty() &&
             seconds_now() - start < 5) {
        std::this_thread::sleep_for(milliseconds(50));
      }
    } catch (const std::exception&) {
    }
    std::_Exit(code);
  }

  const Place place_;
  const GroupOptions options_;
  c10::intrusive_ptr<c10d::Store> store_, watched_;
  std::vector<std::unique_ptr<GlooPart>> parts_;
  std::vector<Greeting> greetings_;
  std::thread watcher_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool finished_ = false;  // under mutex_
  std::atomic<bool> ending_ = false;
  std::mutex saying_;
  bool said_ = false;  // under saying_
};

}  // namespace

std::unique_ptr<Group> Group::connect(const Place& place, const GroupOptions& options) {
  check_can_distribute();
  return std::make_unique<GlooGroup>(place, options);
}

}  // namespace headloom

#endif
