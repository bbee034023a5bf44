#include "serve/host_names.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace headloom::serve {
namespace {

// "LocalHost:8080" -> "localhost", "[::1]:8080" -> "[::1]"
std::string without_port(const std::string& host) {
  const size_t from = host.starts_with('[') ? host.find(']') : 0;
  return lower_case(host.substr(0, from == std::string::npos ? from : host.find(':', from)));
}

bool is_own_address(const std::string& name) {
  return name == "localhost" || name == "[::1]" || name.starts_with("127.");
}

}  // namespace

std::string host_in_url(const std::string& host) {
  return host.find(':') == std::string::npos ? host : "[" + host + "]";
}

HostNames::HostNames(const std::string& bound, const std::vector<std::string>& origins)
    : names_{"localhost", "127.0.0.1", "[::1]"} {
  const std::string own = lower_case(host_in_url(bound));
  all_ = !is_own_address(own) || std::find(origins.begin(), origins.end(), "*") != origins.end();
  std::vector<std::string> more = {own};
  for (const std::string& origin : origins) {
    const size_t scheme = origin.find("://");
    if (scheme != std::string::npos) more.push_back(without_port(origin.substr(scheme + 3)));
  }
  for (const std::string& name : more) {
    if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
  }
}

bool HostNames::has(const std::string& host) const {
  return all_ || host.empty() ||
         std::find(names_.begin(), names_.end(), without_port(host)) != names_.end();
}

std::string HostNames::text() const {
  return str(join({names_.begin(), names_.end() - 1}), " and ", names_.back());
}

}  // namespace headloom::serve
