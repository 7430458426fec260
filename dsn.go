package mysqllock

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// ParseDSN reads a DSN of the driver, for a program that changes some of it before
// it calls [NewConnector].
func ParseDSN(dsn string) (*mysql.Config, Config, error) {
	plain, cfg, err := splitDSN(dsn)
	if err != nil {
		return nil, Config{}, err
	}
	base, err := mysql.ParseDSN(plain)
	if err != nil {
		if strings.HasPrefix(err.Error(), "default addr for network") { // it goes on with what may be a password
			err = errors.New("mysqllock: the DSN has no address that can be read, want user:password@tcp(host:port)/database")
		}
		return nil, Config{}, err
	}
	if err := checkParams(base); err != nil {
		return nil, Config{}, err
	}
	return base, cfg, nil
}

// splitDSN takes the lock parameters out of a DSN. System variables such as
// lock_wait_timeout, which go-sql-driver/mysql takes too, stay in it.
func splitDSN(dsn string) (plain string, cfg Config, err error) {
	slash := strings.LastIndexByte(dsn, '/')
	if slash < 0 { // go-sql-driver says what is wrong; what looks like parameters may be a password
		return dsn, cfg, nil
	}
	head, params, found := strings.Cut(dsn[slash+1:], "?")
	if !found {
		return dsn, cfg, nil
	}
	var rest []string
	seen := make(map[string]bool)
	for _, p := range strings.Split(params, "&") {
		name, raw, found := strings.Cut(p, "=")
		of := parameterOf(name)
		if of == nil {
			if !found { // go-sql-driver ignores it
				if err := checkUnknown(name); err != nil {
					return "", cfg, err
				}
			}
			rest = append(rest, p)
			continue
		}
		value, err := url.QueryUnescape(raw)
		if err != nil {
			return "", cfg, fmt.Errorf("mysqllock: DSN parameter %s: %q is not URL-escaped", name, raw)
		}
		if seen[name] {
			return "", cfg, fmt.Errorf("mysqllock: DSN parameter %s is given twice", name)
		}
		seen[name] = true
		if err := cfg.set(of, value); err != nil {
			return "", cfg, err
		}
	}
	plain = dsn[:slash+1] + head
	if len(rest) > 0 {
		plain += "?" + strings.Join(rest, "&")
	}
	return plain, cfg, nil
}

// set sets the field of a DSN parameter.
func (c *Config) set(of *parameter, value string) (err error) {
	if value == "" {
		return fmt.Errorf("mysqllock: DSN parameter %s is empty", of.name)
	}
	field := of.field(c)
	switch field := field.(type) {
	case *string:
		*field = value
	case *int:
		*field, err = strconv.Atoi(value)
	case *bool:
		*field, err = strconv.ParseBool(value)
	case *time.Duration:
		*field, err = time.ParseDuration(value)
	}
	if err != nil {
		if _, as := time.ParseDuration(value + "s"); as == nil && strings.HasPrefix(err.Error(), "time: missing unit") {
			return fmt.Errorf("mysqllock: DSN parameter %s: cannot read %q, want %ss", of.name, value, value)
		}
		return fmt.Errorf("mysqllock: DSN parameter %s: cannot read %q", of.name, value)
	}
	if is := reflect.ValueOf(field).Elem(); of.want != "" && is.IsZero() {
		return fmt.Errorf("mysqllock: %s is %v, want %s", of.name, is, of.want)
	}
	return nil
}

// checkParams returns an error if parameters that go-sql-driver does not know were meant for
// this driver. It sends what it does not know to the server, as system variables.
func checkParams(cfg *mysql.Config) error {
	for _, name := range slices.Sorted(maps.Keys(cfg.Params)) {
		if parameterOf(name) != nil {
			return fmt.Errorf("mysqllock: Params of the mysql.Config has %s, which this driver must read;"+
				" use mysqllock.ParseDSN in place of mysql.ParseDSN, or set the field of mysqllock.Config", name)
		}
		if err := checkUnknown(name); err != nil {
			return err
		}
	}
	return nil
}
