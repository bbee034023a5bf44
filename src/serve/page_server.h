// One page over HTTP, for `headloom report --watch`. Free of torch.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace headloom::serve {

class PageServer {
 public:
  // Listens on loopback at `port` (0: any that is free), but answers nobody yet. Every GET of "/"
  // is answered with what `page` returns then, calls of which do not overlap; by other names than
  // those of this machine (host_names.h) it is refused. Throws Error where it cannot listen.
  PageServer(int port, std::function<std::string()> page);
  ~PageServer();
  PageServer(const PageServer&) = delete;
  PageServer& operator=(const PageServer&) = delete;

  int port() const;
  // Answers until `ended`, which is asked some times a second, says so.
  void run(const std::function<bool()>& ended);

 private:
  class Http;
  const std::unique_ptr<Http> http_;
};

}  // namespace headloom::serve
