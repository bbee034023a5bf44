// One client's connection, as the HTTP library reads and writes it. Free of torch.
#pragma once

#include <httplib.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>

namespace headloom::serve {

// What a server sets its socket to. The HTTP library by itself would share a port that another
// server has.
void have_port_alone(socket_t socket);

// Bounds what a client may send, in bytes and in time, and finds out whether it is still there.
//
// A client that has sent its request may close its half of the connection and still wait for the
// answer. To the server this looks as if it had gone: either way nothing more can be read. The
// difference is that the system of a client that is gone refuses what is sent to it. So where a
// client has closed its half, the first bytes of what it is going to get anyway are sent ahead, one
// at a time: the answer is then the same, and a client that is gone is noticed.
class Connection final : public httplib::Stream {
 public:
  // Takes the socket; finish() closes it. Once the server is `ending`, nothing more is read: a
  // request that has not come whole is not waited for.
  Connection(socket_t socket, const std::atomic<bool>& ending);

  enum class Fault { none, slow, large, large_header, ending };
  // Why reading has stopped.
  Fault fault() const { return fault_; }
  // The headers are read: from now on the body may come.
  void expect_body();
  bool in_body() const { return in_body_; }
  // Whether anything was sent.
  bool answered() const { return sent_ > 0; }

  // Whether nobody waits for an answer any more.
  bool gone() const;
  // Whether a byte should be sent ahead now, because the client has closed its half.
  bool probe_due();
  // Sends the next byte of every answer ahead.
  void probe();

  // An answer without the library.
  void answer(int status, const std::string& json);
  // Ends the connection so that the client gets all that was sent, also where it is still sending:
  // what it sends is read for a while, where `patient`.
  void finish(bool patient = true);

  bool is_readable() const override;
  bool is_writable() const override;
  ssize_t read(char* out, size_t size) override;
  using Stream::write;
  ssize_t write(const char* data, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  // The library only compares it with what select() can watch, and this does not need that.
  socket_t socket() const override { return 0; }

  const std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
  std::string path = "other";  // that was asked for, as statistics name it

 private:
  // Waits for more of the request; sets the fault and returns false where it does not come.
  bool wait_for_input();
  bool send_all(const char* data, size_t size);
  // Sets the fault where a header is longer than the library takes.
  void measure_headers(const char* text, size_t size);

  const int socket_;
  const std::atomic<bool>& ending_;
  std::array<char, 16384> buffer_;
  size_t from_ = 0, to_ = 0;  // in the buffer
  size_t may_read_;
  size_t lines_ = 0, line_bytes_ = 0;  // of the request's line and headers: whole, and of the next
  std::chrono::steady_clock::time_point deadline_;
  Fault fault_ = Fault::none;
  size_t sent_ = 0, ahead_ = 0;  // bytes; and those of them sent ahead
  bool in_body_ = false, dead_ = false;
  std::chrono::steady_clock::time_point next_probe_ = {};
  std::chrono::milliseconds between_probes_{0};
};

}  // namespace headloom::serve
