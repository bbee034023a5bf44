#include "serve/connection.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "serve/limits.h"

namespace headloom::serve {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What every answer begins with.
constexpr std::string_view kBeginning = "HTTP/1.1 ";
// What the library sends, before the answer, to a client that waits with its body until then.
constexpr std::string_view kContinue = "HTTP/1.1 100 ";
// Before an ended connection is closed, what its client is still sending is read.
constexpr milliseconds kLinger{2000};
constexpr size_t kMostLingered = size_t{16} << 20;
// How often a connection that waits for a request asks whether the server is ending.
constexpr milliseconds kLook{100};

void set(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof value);
}

// The events that `wanted` or an end of the connection brings within `patience`.
short events(int socket, short wanted, milliseconds patience) {
  pollfd entry{.fd = socket, .events = wanted, .revents = 0};
  const int64_t most = std::clamp<int64_t>(patience.count(), 0, 60'000);
  int found = 0;
  do {
    found = poll(&entry, 1, static_cast<int>(most));
  } while (found < 0 && errno == EINTR);
  return found > 0 ? entry.revents : 0;
}

bool is_dead(short events) { return (events & (POLLERR | POLLHUP | POLLNVAL)) != 0; }

void address_of(int socket, int (*get)(int, sockaddr*, socklen_t*), std::string& ip, int& port) {
  sockaddr_storage address;
  socklen_t size = sizeof address;
  char host[NI_MAXHOST], service[NI_MAXSERV];
  if (get(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof host, service,
                  sizeof service, NI_NUMERICHOST | NI_NUMERICSERV) == 0) {
    ip = host;
    std::from_chars(service, service + std::strlen(service), port);
  }
}

}  // namespace

void have_port_alone(socket_t socket) { set(socket, SOL_SOCKET, SO_REUSEADDR, 1); }

Connection::Connection(socket_t socket, const std::atomic<bool>& ending)
    : socket_(socket),
      ending_(ending),
      may_read_(kMostHead),
      deadline_(Clock::now() + std::chrono::seconds(kHeadSeconds)) {
  set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  // A client whose machine or network is gone sends nothing at all.
  set(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket_, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(socket_, IPPROTO_TCP, TCP_KEEPINTVL, 15);
  set(socket_, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, 60'000);
}

void Connection::expect_body() {
  in_body_ = true;
  may_read_ = kMostBody;  // what came with the headers is in the buffer
  deadline_ = Clock::now() + std::chrono::seconds(kBodySeconds);
}

bool Connection::gone() const { return dead_ || is_dead(events(socket_, 0, milliseconds(0))); }

bool Connection::probe_due() {
  if ((events(socket_, POLLRDHUP, milliseconds(0)) & POLLRDHUP) == 0) return false;
  if (Clock::now() < next_probe_) return false;
  between_probes_ = std::max(2 * between_probes_, milliseconds(250));
  next_probe_ = Clock::now() + between_probes_;
  return true;
}

void Connection::probe() {
  if (sent_ >= kBeginning.size()) return;
  if (send_all(&kBeginning[sent_], 1)) ++ahead_;
}

bool Connection::is_readable() const {
  return from_ < to_ || (events(socket_, POLLIN, milliseconds(0)) & POLLIN) != 0;
}

bool Connection::is_writable() const {
  if (dead_) return false;
  const short found = events(socket_, POLLOUT, std::chrono::seconds(kWriteSeconds));
  return (found & POLLOUT) != 0 && !is_dead(found);
}

bool Connection::wait_for_input() {
  while (fault_ == Fault::none) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
    if (ending_) {
      fault_ = Fault::ending;
    } else if (left.count() <= 0) {
      fault_ = Fault::slow;
    } else if (events(socket_, POLLIN, std::min(left, kLook)) != 0) {
      return true;
    }
  }
  return false;
}

void Connection::measure_headers(const char* text, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    // The library has a limit of its own for the first line.
    if (++line_bytes_ > CPPHTTPLIB_HEADER_MAX_LENGTH && lines_ > 0) fault_ = Fault::large_header;
    if (text[i] != '\n') continue;
    ++lines_;
    line_bytes_ = 0;
  }
}

ssize_t Connection::read(char* out, size_t size) {
  if (from_ == to_) {
    if (may_read_ == 0) fault_ = Fault::large;
    if (!wait_for_input()) return -1;
    const ssize_t got = recv(socket_, buffer_.data(), std::min(buffer_.size(), may_read_), 0);
    if (got <= 0) return got;
    from_ = 0;
    to_ = static_cast<size_t>(got);
    may_read_ -= to_;
  }
  const size_t count = std::min(size, to_ - from_);
  std::copy_n(buffer_.data() + from_, count, out);
  from_ += count;
  if (!in_body_) measure_headers(out, count);
  return static_cast<ssize_t>(count);
}

bool Connection::send_all(const char* data, size_t size) {
  while (size > 0) {
    const ssize_t done = dead_ ? -1 : send(socket_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done > 0) {
      data += done;
      size -= static_cast<size_t>(done);
      sent_ += static_cast<size_t>(done);
      continue;
    }
    const bool full = !dead_ && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (!full || !is_writable()) {
      dead_ = true;
      return false;
    }
  }
  return true;
}

ssize_t Connection::write(const char* data, size_t size) {
  const size_t skipped = sent_ == ahead_ ? std::min(ahead_, size) : 0;
  const bool interim = sent_ == 0 && std::string_view(data, size).starts_with(kContinue);
  const bool done = send_all(data + skipped, size - skipped);
  if (interim) sent_ = 0;  // nothing of the answer
  return done ? static_cast<ssize_t>(size) : -1;
}

void Connection::answer(int status, const std::string& json) {
  const char* reason = status == 408   ? "Request Timeout"
                       : status == 431 ? "Request Header Fields Too Large"
                       : status == 503 ? "Service Unavailable"
                                       : "Bad Request";
  const std::string head = std::string(kBeginning) + std::to_string(status) + " " + reason +
                           "\r\nContent-Type: application/json\r\nConnection: close\r\n"
                           "Content-Length: " +
                           std::to_string(json.size()) + "\r\n\r\n";
  write(head + json);
}

void Connection::finish(bool patient) {
  shutdown(socket_, SHUT_WR);
  // Closing a socket with unread bytes would tell the client to throw away what it was sent.
  const auto end = Clock::now() + (patient ? kLinger : milliseconds(5));
  size_t read = 0;
  while (!dead_ && read < kMostLingered && Clock::now() < end) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (events(socket_, POLLIN, left) == 0) break;
    const ssize_t got = recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got <= 0) break;
    read += static_cast<size_t>(got);
  }
  close(socket_);
}

void Connection::get_remote_ip_and_port(std::string& ip, int& port) const {
  address_of(socket_, getpeername, ip, port);
}

void Connection::get_local_ip_and_port(std::string& ip, int& port) const {
  address_of(socket_, getsockname, ip, port);
}

}  // namespace headloom::serve
