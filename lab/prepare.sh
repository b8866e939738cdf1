#!/bin/sh
# Run once, as root in the lab machine before it is frozen: the packs are uploaded, the modules lie in their order.
set -eu

while read -r module; do
    insmod "/lab/modules/$module.ko"
done < /lab/modules/order
rm -r /lab/modules

for pack in /lab/packs/*.erofs; do
    name=${pack##*/}
    name=${name%.erofs}
    mkdir "/lab/$name"
    mount -t erofs -o ro,loop "$pack" "/lab/$name"
done

# The home is on a disk, as it would be elsewhere: what is read from it can be counted and held back.
truncate --size=3G /lab/disk
mkfs.ext4 -q -O ^has_journal /lab/disk
mount -o loop /lab/disk /mnt
cp -a /lab/home/. /mnt
umount /lab/home
rm /lab/packs/home.erofs
mount --move /mnt /lab/home
sync

# As on a Debian that has it on its disk: large, and devices in it work.
mount -t tmpfs -o mode=1777,nosuid,size=75% tmpfs /tmp

mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 /sys/fs/cgroup
for controller in cpu io memory pids; do
    echo "+$controller" > /sys/fs/cgroup/cgroup.subtree_control
done
echo 1 > /proc/sys/net/ipv4/ip_forward
mkdir /lab/out /lab/compiled

for device in kvm net/tun vhost-net vhost-vsock; do
    [ -c "/dev/$device" ] || { echo "The lab machine has no /dev/$device" >&2; exit 1; }
done
# They run, and are in memory in every fork.
for program in firecracker jailer qemu-system-x86_64; do
    "$program" --version > /dev/null
done
