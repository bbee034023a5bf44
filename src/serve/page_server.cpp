#include "serve/page_server.h"

#include <httplib.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "serve/connection.h"
#include "serve/fields.h"
#include "serve/host_names.h"

namespace headloom::serve {

class PageServer::Http : public httplib::Server {
 public:
  Http(int port, std::function<std::string()> page) : page_(std::move(page)) {
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      const std::string host = request.get_header_value("Host");
      const auto refuse = [&](int status, const std::string& why) {
        response.status = status;
        response.set_content(why + "\n", "text/plain; charset=utf-8");
        return HandlerResponse::Handled;
      };
      if (!names_.has(host)) {
        return refuse(421, str("the Host is '", shown_bare(host), "', expected ", names_.text(),
                               ", because the report is for this machine alone."));
      }
      const bool reads = request.method == "GET" || request.method == "HEAD";
      if (request.path == "/" && reads) return HandlerResponse::Unhandled;
      return refuse(404, str("there is no ", shown_bare(request.method), " ",
                             shown_bare(request.path), " here; the report is at GET /."));
    });
    Get("/", [this](const httplib::Request&, httplib::Response& response) {
      const std::lock_guard lock(mutex_);
      response.set_content(page_(), "text/html; charset=utf-8");
    });
    set_socket_options(have_port_alone);
    errno = 0;
    port_ = port == 0 ? bind_to_any_port(kHost) : bind_to_port(kHost, port) ? port : -1;
    require(port_ > 0, "cannot listen at ", kHost, ":", port, ": ", std::strerror(errno), ".");
  }

  int port() const { return port_; }

  void run(const std::function<bool()>& ended) {
    std::atomic<bool> over = false;
    std::thread listener([&] {
      listen_after_bind();
      over = true;
    });
    while (!over && !(is_running() && ended())) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    stop();
    listener.join();
  }

 private:
  static constexpr const char* kHost = "127.0.0.1";

  const HostNames names_{kHost};
  std::mutex mutex_;
  const std::function<std::string()> page_;
  int port_ = 0;
};

PageServer::PageServer(int port, std::function<std::string()> page)
    : http_(std::make_unique<Http>(port, std::move(page))) {}

PageServer::~PageServer() = default;

int PageServer::port() const { return http_->port(); }

void PageServer::run(const std::function<bool()>& ended) { http_->run(ended); }

}  // namespace headloom::serve
